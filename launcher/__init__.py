"""From a command line to a running step loop.

Light on purpose: importing this package imports nothing heavy, because the keeper of every rank
imports it and stays in memory for the whole run.
"""
