"""Guards against bad losses and weights that do not move: alarms, and going back from one."""
