"""Progress and learning rate by samples: with batches of varying size the number of steps is not known beforehand."""

from __future__ import annotations

import math


class SampleClock:
    """Samples trained over all ranks. A checkpoint holds only those of finished updates, because training resumes at the
    beginning of an accumulation window and counts its samples again."""

    def __init__(self) -> None:
        self.samples = 0
        self.samples_updated = 0

    def tick(self, samples: int, ends_update: bool) -> None:
        self.samples += samples
        if ends_update:
            self.samples_updated = self.samples

    def restore(self, samples: int) -> None:
        self.samples = self.samples_updated = samples


def cosine_factor(samples: int, schedule_samples: int, warmup_samples: int, min_ratio: float) -> float:
    """Share of the full learning rate for the update that ends with sample number `samples`: up to 1 at `warmup_samples`,
    then along a cosine to `min_ratio` at `schedule_samples` and there ever after."""
    if samples < warmup_samples:
        return samples / warmup_samples
    progress = min(1.0, (samples - warmup_samples) / max(1, schedule_samples - warmup_samples))
    return min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))
