"""NoProposer: plain decoding."""

from __future__ import annotations

from specdec.decode_state import DecodeState
from specdec.proposers.base import Draft, Proposer


class NoProposer(Proposer):
    """Drafts nothing, so every step emits one token of the target's own."""

    name = "none"
    placement = "device"

    def propose(self, state: DecodeState) -> Draft:
        return Draft.empty(state.num_rows, state.device)
