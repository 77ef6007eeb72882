from __future__ import annotations

from hypothesis import settings

settings.register_profile("odb", deadline=None, derandomize=True, database=None, max_examples=120)
settings.load_profile("odb")
