"""How much of the device each component may plan with: the budget, what is kept, what is allowed.

Promises: the reserve for activations is what was measured, once that is more than was asked for; a
component's terms leave out what others keep on the device for good.
"""

from __future__ import annotations

from collections.abc import Mapping

from offloadd.offload.accelerator.interface import Accelerator
from offloadd.offload.planning.allowances import Allowance
from offloadd.offload.planning.planning import Planning, Terms
from offloadd.offload.streaming.tier import DeviceTier


class DeviceBudget:
    """`budget_bytes` for weights, ring and activations, of which `reserve_bytes` stay free.

    `allowances` bound single components, by name, beside that.
    """

    def __init__(self, accelerator: Accelerator, budget_bytes: int, reserve_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.reserve_bytes = reserve_bytes
        self.tier = DeviceTier(accelerator, budget_bytes - reserve_bytes)
        self.allowances: dict[str, Allowance] = {}
        self._accelerator = accelerator

    def set(self, budget_bytes: int) -> None:
        """Follow another budget from now on; what is on the device stays there."""
        self.budget_bytes = budget_bytes
        self.tier.limit_bytes = budget_bytes - self.reserve_bytes

    def terms(self, name: str, plannings: Mapping[str, Planning]) -> Terms:
        """What one component may plan with, as things are now."""
        activations_bytes = self._accelerator.peak_bytes() - self.tier.used_bytes
        if activations_bytes > self.reserve_bytes:
            self.reserve_bytes = activations_bytes
            self.set(self.budget_bytes)
        kept_bytes = {
            other: planning.component.leftover_bytes for other, planning in plannings.items()
        }
        others_bytes = sum(kept for other, kept in kept_bytes.items() if other != name)
        budget_bytes = self.budget_bytes - others_bytes
        allowance = self.allowances.get(name)
        if allowance is not None:
            sharing = [one for one in kept_bytes if self.allowances.get(one) is allowance]
            allowance.kept_bytes = sum(kept_bytes[one] for one in sharing)
            shared_bytes = allowance.kept_bytes - kept_bytes.get(name, 0)
            allowed_bytes = allowance.limit_bytes - shared_bytes + self.reserve_bytes
            budget_bytes = min(budget_bytes, allowed_bytes)
        return Terms(budget_bytes, self.reserve_bytes)
