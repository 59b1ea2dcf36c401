"""The Hydra configuration. YAML holds the values; launcher/config.py the types and checks."""
