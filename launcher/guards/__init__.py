"""Guards against bad losses: what is an alarm, and going back from one."""
