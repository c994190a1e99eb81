"""From the work of a step to the next id of each of its outputs: the model, grammar masks, sampling."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._core import ContextTree
from .call import Output
from .grammar import Grammars, unpack_masks
from .logprobs import log_batch
from .runner import Reservation, Runner, Work, rows_to_log
from .sampling import Sampler, to_list


class NextIds:
    """Runs the model and chooses an id for each output that is due one."""

    def __init__(self, runner: Runner, grammars: Grammars) -> None:
        self._runner = runner
        self._grammars = grammars
        self._sampler = Sampler()

    def choose(
        self,
        tree: ContextTree,
        work: Sequence[Work],
        outputs: Sequence[Output | None],
        reservation: Reservation,
    ) -> list[int | None]:
        """The ids of :meth:`launch`, with None for -1."""
        return to_list(self.launch(tree, work, outputs, reservation))

    def launch(
        self,
        tree: ContextTree,
        work: Sequence[Work],
        outputs: Sequence[Output | None],
        reservation: Reservation,
        previous_ids: Tensor | None = None,
    ) -> Tensor:
        """Run the model, with the masks of grammars computed beside it, and choose an id per output: int64
        on the device, valid until the next step is launched there.

        ``outputs[i]`` is the output that ``work[i]`` has logits for, None for one without. One entry per
        output, in order; -1 where the logits are not finite numbers. Log-probabilities that the prompt of a
        call asked for are added to its log."""
        sampling = [(w.call, output) for w, output in zip(work, outputs, strict=True) if output is not None]
        matchers = [output.matcher for _, output in sampling if output.matcher is not None]
        masks = self._grammars.start_masks(matchers) if matchers else None
        rows, logs, ids = rows_to_log(work)
        wants_logits = [output is not None for output in outputs]
        states = [output.state for _, output in sampling]
        positions = [call.num_ids for call, _ in sampling]
        draws = self._sampler.draws(states, positions)
        try:
            logits, likeliest, drawn = self._runner.forward(
                tree, reservation, wants_logits, rows, previous_ids, draws
            )
        finally:
            allowed = None if masks is None else masks.result()
        if logs:
            log_batch(logs, logits[len(sampling) :], torch.tensor(ids, device=logits.device))
            logits, likeliest, drawn = logits[: len(sampling)], None, None
        return self._sampler.choose(
            logits,
            states,
            positions,
            None if allowed is None else unpack_masks(allowed, logits.shape[1], logits.device),
            likeliest,
            drawn,
        )
