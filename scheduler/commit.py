"""Commit: the only place where a sequence's state changes. Cuts an accepted block at the first end inside it."""

import time
from dataclasses import dataclass

from verdraft.scheduler.counters import Totals
from verdraft.scheduler.outputs import FinishReason, TokenSlice
from verdraft.scheduler.scheduler import Scheduler
from verdraft.scheduler.sequence import Sequence
from verdraft.scheduler.verifier import Verified
from verdraft.spec.draft import EMPTY


@dataclass(frozen=True, slots=True)
class Committer:
    """Applies what a pass verified. `eos` are the model's end tokens."""

    scheduler: Scheduler
    totals: Totals
    eos: frozenset[int]

    def commit(self, verified: Verified) -> TokenSlice | None:
        """Text, ids, logprobs, KV and suffix index all end at the same token. None when nothing was decided yet."""
        seq = verified.work.seq
        seq.draft = EMPTY
        seq.prompt_logprobs += verified.prompt_logprobs
        if not verified.work.yields:
            self._advance(seq, verified.work.end)
            return None
        decoding = seq.decoding
        kept, finish = self._cut(seq, verified.tokens)
        self._count(verified, decoding, len(kept))
        self._append(seq, kept)
        # The pass computed the last known token and the accepted ones; a recovered or bonus token is not computed yet.
        self._advance(seq, min(len(seq.tokens), verified.work.end - self._rejected(verified)))
        return self._slice(verified, kept, finish)

    def _rejected(self, verified: Verified) -> int:
        return len(verified.work.draft.tokens) - max(0, len(verified.tokens) - 1)

    def _cut(self, seq: Sequence, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
        """The tokens up to and including the first that ends the sequence, and why it ends."""
        room = seq.max_len - len(seq.tokens)
        for i, token in enumerate(tokens[:room], 1):
            if self._stops(seq, token):
                return tokens[:i], "stop"
        return tokens[:room], "length" if len(tokens) >= room else None

    def _stops(self, seq: Sequence, token: int) -> bool:
        request = seq.request
        seq.push(token)
        stopped = request.stop.push(token) or request.constraint.ended or token in request.params.stop_token_ids
        return stopped or (token in self.eos and not request.params.ignore_eos)

    def _append(self, seq: Sequence, tokens: tuple[int, ...]) -> None:
        seq.tokens += tokens
        seq.drafter.extend(tokens)

    def _advance(self, seq: Sequence, computed: int) -> None:
        seq.settle(computed)
        self.scheduler.remember_blocks(seq)

    def _count(self, verified: Verified, decoding: bool, num_kept: int) -> None:
        stats, draft = verified.work.seq.request.stats, verified.work.draft
        self.totals.generation_tokens += num_kept
        if verified.margins:
            for margins in (stats.margins, self.totals.margins):
                margins.count(verified.margins[:num_kept])
        if decoding:
            self.totals.target_passes += 1
            stats.num_target_passes += 1
        if draft.tokens:
            accepted = min(len(verified.tokens) - 1, num_kept)
            self.totals.count_draft(stats, draft.source, len(draft.tokens), accepted)

    def _count_prompt(self, seq: Sequence) -> None:
        if seq.request.choice == 0:  # the choices of one prompt count it once
            self.totals.prompt_tokens += seq.num_prompt
            self.totals.prompt_tokens_cached += seq.cached_tokens or 0

    def _slice(self, verified: Verified, kept: tuple[int, ...], finish: FinishReason | None) -> TokenSlice:
        seq = verified.work.seq
        first = seq.first_token_at is None
        if first:
            seq.first_token_at = time.monotonic()
            self._count_prompt(seq)
        prompt_logprobs = tuple(seq.prompt_logprobs) if first else ()
        logprobs = verified.logprobs[: len(kept)]
        if finish is None:
            return TokenSlice(kept, logprobs, prompt_logprobs)
        last = self.end(seq, finish)
        return TokenSlice(kept, logprobs, prompt_logprobs, finish, summary=last.summary)

    def end(self, seq: Sequence, finish: FinishReason) -> TokenSlice:
        """Give everything back but the draft source; the sequence's last slice, without tokens."""
        self.scheduler.remove(seq)
        return TokenSlice(finish=finish, summary=seq.summary(time.monotonic()))
