"""Commit: the only place where a sequence's state changes. Cuts an accepted block at the first end inside it."""

import time
from dataclasses import dataclass

from verdraft.scheduler.counters import Totals
from verdraft.scheduler.outputs import FinishReason, TokenLogprobs, TokenSlice
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
        work, tokens = verified.work, verified.tokens
        seq = work.seq
        seq.draft = EMPTY
        seq.prompt_logprobs += verified.prompt_logprobs
        if not work.yields:
            self._advance(seq, work.end)
            return None
        decoding = seq.decoding
        kept, finish = self._cut(seq, tokens)
        self._count(verified, decoding, len(kept))
        seq.tokens += kept
        seq.drafter.extend(kept)
        # The pass computed the last known token and the accepted ones; a recovered or bonus token is not computed yet.
        rejected = len(work.draft.tokens) - max(0, len(tokens) - 1)
        self._advance(seq, min(len(seq.tokens), work.end - rejected))
        return self._slice(verified, kept, finish)

    def _cut(self, seq: Sequence, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
        """The tokens up to and including the first that ends the sequence, and why it ends."""
        room = seq.max_len - len(seq.tokens)
        for i, token in enumerate(tokens, 1):
            if self._stops(seq, token):
                return tokens[:i], "stop"
            if i == room:
                return tokens[:i], "length"
        return tokens, None if room else "length"

    def _stops(self, seq: Sequence, token: int) -> bool:
        request = seq.request
        seq.push(token)
        stopped = request.stop.push(token) or request.constraint.ended or token in request.params.stop_token_ids
        return stopped or (token in self.eos and not request.params.ignore_eos)

    def _advance(self, seq: Sequence, computed: int) -> None:
        seq.settle(computed)
        self.scheduler.remember_blocks(seq)

    def _count(self, verified: Verified, decoding: bool, num_kept: int) -> None:
        work = verified.work
        stats, draft = work.seq.request.stats, work.draft
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

    def _begin_output(self, seq: Sequence) -> None:
        seq.first_token_at = time.monotonic()
        if seq.request.choice == 0:  # the choices of one prompt count it once
            self.totals.prompt_tokens += seq.num_prompt
            self.totals.prompt_tokens_cached += seq.cached_tokens or 0

    def _slice(self, verified: Verified, kept: tuple[int, ...], finish: FinishReason | None) -> TokenSlice:
        seq, logprobs = verified.work.seq, verified.logprobs[: len(kept)]
        of_prompt: tuple[TokenLogprobs, ...] = ()
        if seq.first_token_at is None:
            self._begin_output(seq)
            of_prompt = tuple(seq.prompt_logprobs)
        if finish is None:
            return TokenSlice(kept, logprobs, of_prompt)
        return TokenSlice(kept, logprobs, of_prompt, finish, summary=self.end(seq, finish).summary)

    def end(self, seq: Sequence, finish: FinishReason) -> TokenSlice:
        """Give everything back but the draft source; the sequence's last slice, without tokens."""
        self.scheduler.remove(seq)
        return TokenSlice(finish=finish, summary=seq.summary(time.monotonic()))
