"""The configuration groups of `odb-train`, packaged as `odb_lightning.conf` (`pkg://odb_lightning.conf` for Hydra)."""
