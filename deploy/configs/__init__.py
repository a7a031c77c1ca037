"""Service configurations that ship with the package, one YAML file each."""
