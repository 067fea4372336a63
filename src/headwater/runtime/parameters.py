"""The system parameters of a running engine: defaults, what the data directory holds, what the user sets."""

from __future__ import annotations

from collections.abc import Mapping

from headwater.barrier.coordinator import LaneParameters
from headwater.config import PARAMETERS, parse_parameter
from headwater.errors import UsageError
from headwater.storage.meta import MetaStore


class Parameters:
    """Values by name. `of_lanes` is what the lanes look at before every barrier, so a change is in force at once."""

    def __init__(self, meta: MetaStore, given: Mapping[str, str]) -> None:
        self._meta = meta
        stored = {k: int(v) for k, v in meta.settings("parameter:").items()}
        self._values = {name: stored.get(name, p.default) for name, p in PARAMETERS.items()}
        for name, text in given.items():
            value = parse_parameter(name, text)
            if PARAMETERS[name].fixed and name in stored and stored[name] != value:
                raise UsageError(
                    "PARAMETER_FIXED",
                    f"{name} is {stored[name]} since this data directory was made",
                    hint="leave it out",
                )
            self._values[name] = value
        for name, value in self._values.items():
            meta.set_setting(f"parameter:{name}", str(value))
        self.of_lanes = LaneParameters()
        self._apply()

    def __getitem__(self, name: str) -> int:
        return self._values[name]

    def set(self, name: str, text: str | None) -> None:
        """None: back to the default."""
        known = PARAMETERS.get(name)
        value = known.default if known is not None and text is None else parse_parameter(name, text or "")
        if PARAMETERS[name].fixed:
            raise UsageError("PARAMETER_FIXED", f"{name} cannot change after the data directory was made")
        self._meta.set_setting(f"parameter:{name}", str(value))
        self._values[name] = value
        self._apply()

    def _apply(self) -> None:
        self.of_lanes.barrier_interval_s = self["barrier_interval_ms"] / 1000
        self.of_lanes.checkpoint_frequency = self["checkpoint_frequency"]
