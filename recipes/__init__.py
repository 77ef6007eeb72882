"""The recipes of `odb-train`, packaged as `odb_lightning.recipes`; `odb_lightning.config` makes them the group `recipe`."""
