"""Settings whose state DeepSpeed hands to no checkpoint are refused at start, by their names."""

from types import SimpleNamespace
from typing import Any

import pytest
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from engine.checkpoint.errors import RefusedError
from engine.checkpoint.zero3 import refuse_unsupported

OFFLOAD = "zero_optimization.offload_optimizer"


def engine(zero: dict[str, Any] | None = None, **attributes: Any) -> Any:
    """Return what `refuse_unsupported` looks at, with DeepSpeed's own reading of the settings."""
    fields = {
        "_config": SimpleNamespace(zero_config=DeepSpeedZeroConfig(**{"stage": 3, **(zero or {})})),
        "has_moe_layers": False,
        "pipeline_parallelism": False,
        "mp_world_size": 1,
    }
    if fields["_config"].zero_config.stage == 3:
        fields["optimizer"] = SimpleNamespace(
            optimizer=SimpleNamespace(param_groups=[{}]), sub_group_to_group_id={0: 0}
        )
    return SimpleNamespace(**{**fields, **attributes})


@pytest.mark.parametrize(
    ("zero", "setting"),
    [
        ({"stage": 2}, "zero_optimization.stage is 2, wanted 3"),
        ({"offload_optimizer": {"device": "nvme"}}, f"{OFFLOAD}.device is nvme"),
        ({"offload_param": {"device": "nvme"}}, "zero_optimization.offload_param.device is nvme"),
        ({"offload_optimizer": {"device": "cpu", "ratio": 0.3}}, f"{OFFLOAD}.ratio is below 1"),
        (
            {"offload_optimizer": {"device": "cpu", "super_offload": True}},
            f"{OFFLOAD}.super_offload is on",
        ),
        ({"zenflow": {"topk_ratio": 0.1}}, "zero_optimization.zenflow is on"),
        (
            {"zero_quantized_nontrainable_weights": True},
            "zero_optimization.zero_quantized_nontrainable_weights is on",
        ),
    ],
)
def test_a_setting_is_refused_by_its_name(zero: dict[str, Any], setting: str) -> None:
    with pytest.raises(RefusedError) as raised:
        refuse_unsupported(engine(zero))
    assert str(raised.value).startswith(setting)
    assert "Change this setting" in str(raised.value)


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ({"has_moe_layers": True}, "mixture-of-experts"),
        ({"pipeline_parallelism": True}, "pipeline parallelism"),
        ({"mp_world_size": 2}, "tensor_parallel"),
    ],
)
def test_another_parallelism_is_refused(attributes: dict[str, Any], said: str) -> None:
    with pytest.raises(RefusedError, match=said):
        refuse_unsupported(engine(**attributes))


@pytest.mark.parametrize("offload", [None, {"device": "cpu"}, {"device": "none"}])
def test_what_is_supported_is_not_refused(offload: dict[str, str] | None) -> None:
    refuse_unsupported(engine({"offload_optimizer": offload, "offload_param": offload}))
