"""Single values that a loop records at each step, such as its loss."""

from typing import Any, Dict, List, Mapping

import torch

from contract.errors import UserError


class StepScalars:
    """The scalars of one step, some of which may still be on their way from a GPU."""

    def __init__(self, scalars: Mapping[str, Any]) -> None:
        """Begin to copy the values of these names, and skip None. Raises UserError for a value that
        is not a single number."""
        self._values: Dict[str, Any] = {}
        devices = set()
        for name, value in scalars.items():
            if value is None:
                continue
            try:
                if isinstance(value, torch.Tensor) and value.is_cuda and value.numel() == 1:
                    devices.add(value.device)
                    # Into pinned memory, so that neither the host nor the device waits.
                    self._values[name] = value.detach().to("cpu", non_blocking=True)
                else:
                    self._values[name] = float(value.item() if hasattr(value, "item") else value)
            except (TypeError, ValueError, RuntimeError) as error:
                shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
                raise UserError(
                    f"tandem.timings.step: {name} is a {type(value).__name__}{shape}, and a scalar "
                    f"is a single number: give {name}.mean(), or leave it out."
                ) from error
        self._arrivals: List[Any] = []  # an event for each device
        for device in devices:
            arrival = torch.cuda.Event()
            arrival.record(torch.cuda.current_stream(device))
            self._arrivals.append(arrival)

    def have_arrived(self) -> bool:
        """Return whether `read` would not wait."""
        return all(arrival.query() for arrival in self._arrivals)

    def read(self) -> Dict[str, float]:
        """Return the values, after waiting for their devices."""
        for arrival in self._arrivals:
            arrival.synchronize()
        return {name: float(value) for name, value in self._values.items()}
