"""Opens a page in headless Chromium, and tells what a person would see of it."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

_TIMEOUT_SECONDS = 120
_PROBE = """<script>addEventListener("load", () => {
  const shown = [...document.querySelectorAll("figure svg")].filter(one => one.clientWidth > 0);
  const result = document.createElement("pre");
  result.id = "probe";
  result.textContent = JSON.stringify({
    figures: Object.fromEntries(shown.map(one => [one.closest("figure").id, one.clientWidth])),
    shapes: shown.map(one => one.querySelectorAll("path, use, rect").length),
    labels: shown.map(one => one.getAttribute("aria-label")),
    width: innerWidth,
    overflow: document.documentElement.scrollWidth - innerWidth,
    page: getComputedStyle(document.body).backgroundColor,
    ink: getComputedStyle(document.querySelector("figure svg text") || document.body).fill,
  });
  parent.document.body.append(result);
})</script>"""


def look(page: Path, *, width: int, dark: bool = False) -> dict[str, Any]:
    """Open a copy of a page, with a script that measures it, in a frame of a width in pixels.

    In a frame, because the browser's own window is never narrower than 500.

    Returns:
        figures, by id, with their widths; shapes, drawn in each; their labels; the frame's width;
        overflow, by which the page is wider; page and ink, two colours; console, what was said
        there.
    """
    probed = page.with_name(f"probed-{width}-{dark}.html")
    inside = html.escape(page.read_text(encoding="utf-8") + _PROBE)
    probed.write_text(
        f'<!DOCTYPE html><iframe srcdoc="{inside}" style="border: 0; width: {width}px"></iframe>'
    )
    done = subprocess.run(
        [
            chromium(),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={page.parent / 'profile'}",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            "--window-size=1400,1200",
            "--enable-logging=stderr",
            "--virtual-time-budget=10000",
            "--dump-dom",
            probed.as_uri(),
        ],
        env={**os.environ, "HOME": str(page.parent)},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_SECONDS,
        check=False,
    )
    found = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stderr[-3000:]
    console = re.findall(r"CONSOLE.*", done.stderr)
    return {**json.loads(html.unescape(found[1])), "console": console}


def text_of(page: str) -> str:
    """What a person reads of a page, without its drawings, on one line."""
    body = re.sub(r"<(svg|style)\b.*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", body)).split())


def chromium() -> str:
    """Return the browser; without one the test fails where it would have been installed."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if (path := shutil.which(name)) is not None:
            return path
    hint = "chromium is not installed (tests/install_system_packages.sh)"
    release = Path("/etc/os-release")
    if os.geteuid() == 0 and release.exists() and "ID=debian\n" in release.read_text():
        pytest.fail(hint)
    pytest.skip(hint)
