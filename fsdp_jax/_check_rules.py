"""Which documented rules make sharded numbers differ: found by experiment.

One rule after the other is taken back in a replay on the unsharded twin, and the
differences that go away with it are its own. What must not live here: running
(`_check_run`), joining (`_check_join`), and wording (`_check_findings`).
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from fsdp_jax import _check_findings as findings
from fsdp_jax._check_batch import Placing, find_batch, replicated
from fsdp_jax._check_fit import fit
from fsdp_jax._check_host import Held, Tolerance
from fsdp_jax._check_join import join
from fsdp_jax._check_report import CheckRow, Finding
from fsdp_jax._check_run import Key, Lab, Replay, Run, run_sharded
from fsdp_jax._check_subject import Variation
from fsdp_jax._state import state_of

_ORDER = ("loss", "gradient", "output", "state")
_ROUNDINGS = 16  # of a policy's dtype, that a deep model may add up


@dataclasses.dataclass
class Pair:
    """One variation, on the whole batch and by the rules."""

    whole: Run
    rules: Run
    replay: Replay


class Judge:
    """Compares a sharded run with the unsharded one, and explains differences.

    Args:
        lab: runs of the twin.
        tolerance: what counts as equal.
    """

    def __init__(self, lab: Lab, tolerance: Tolerance) -> None:
        self.lab, self.subject = lab, lab.subject
        self.tolerance = tolerance
        self.found: dict[Key, list[Finding]] = {}
        self.notes: list[str] = []
        self.how = Variation()
        self.replayed: Replay | None = None

    def run_replay(self) -> Replay | None:
        """The function on each device's rows; None, with a note, where it fails."""
        try:
            self.replayed = self.lab.replay(self.how)
        except Exception as error:
            self.notes.append(
                "the unsharded model does not run on each device's rows, so that no "
                f"difference is explained: {type(error).__name__}: {error}"
            )
        return self.replayed

    def whole(self, how: Variation, arrays: list[Held] | None = None) -> Run:
        """The unsharded numbers."""
        return join(self.subject, self.lab.whole(how, arrays), {})

    def pair(self, how: Variation, like: Run) -> Pair:
        """A variation, on the whole batch and by the rules."""
        replay = self.lab.replay(how)
        return Pair(self.whole(how), join(self.subject, replay, like), replay)

    def differ(self, a: Run, b: Run, keys: Iterable[Key]) -> list[Key]:
        """The keys at which two runs do not count as equal."""
        return [
            k
            for k in keys
            if k not in a or k not in b or not self.tolerance.equal(a[k], b[k])
        ]

    def judge(self, sharded: Run, whole: Run) -> list[CheckRow]:
        """One row per array that differs."""
        keys = list(dict.fromkeys([*whole, *sharded]))
        differing = self.differ(sharded, whole, keys)
        self.found = {k: [] for k in differing}
        if differing and self.replayed is not None:
            self._explain(sharded, differing)
        differing.sort(key=lambda key: _ORDER.index(key[0]))
        return [self._row(k, sharded, whole) for k in differing]

    def _runs(self, how: Variation) -> bool:
        """Whether the unsharded function runs on each device's rows."""
        try:
            self.lab.replay(how)
        except Exception:
            return False
        return True

    def of_error(self, error: Exception) -> CheckRow:
        """The row of a sharded run that fails, with the arguments that may be why."""
        text, why = f"{type(error).__name__}: {error}", []
        self.how = dataclasses.replace(self.how, dropout=False)
        if not self._runs(self.how):
            placings, told = self.placings(), "the function runs"
            by_rows = bool(placings)
            alternatives = (
                [placings] if by_rows else [[p] for p in replicated(self.subject)]
            )
            for found in alternatives:
                if self._runs(self._placed(found[-1])):
                    why += [
                        findings.cut_argument(self.subject, p, told, by_rows)
                        for p in found
                    ]
        name = type(error).__name__
        return CheckRow("error", name, np.inf, np.inf, tuple(why), text)

    def _row(self, key: Key, sharded: Run, whole: Run) -> CheckRow:
        what, path = key
        a, b = sharded.get(key), whole.get(key)
        if a is None or b is None:
            side = "sharded" if b is None else "unsharded"
            text = f"(only {side})"
            return CheckRow(what, path, np.inf, np.inf, tuple(self.found[key]), text)
        gap = self.tolerance.difference(a, b)
        text = "" if a.shape == b.shape else f"{a.shape} for {b.shape}"
        return CheckRow(
            what, path, gap.largest, gap.relative, tuple(self.found[key]), text
        )

    # --- one rule after the other -------------------------------------------------

    def _explain(self, sharded: Run, differing: list[Key]) -> None:
        now = self.pair(self.how, sharded)
        rest = self._precision(sharded, now, differing)
        faults = self.differ(rest, now.rules, differing)
        for key in faults:
            self.found[key] = []
        left = [k for k in differing if k not in faults and k in now.whole]
        left = self.differ(now.rules, now.whole, left)
        drawing, left, now = self._random(left, now)
        for step in (self._cut, self._batch_norm, self._slices, self._factors):
            if left:
                left, now = step(left, now)
        self._last(left, now, drawing)

    def _step(
        self,
        how: Variation,
        make: Callable[[str], Finding],
        left: list[Key],
        now: Pair,
        new: Pair | None = None,
    ) -> tuple[list[Key], Pair]:
        """Take a rule back: it is a cause where the difference is another one then.

        Args:
            how: the runs in which it is taken back.
            make: makes the finding of what the difference is then.
            left: where there still are differences.
            now: the runs before.
            new: the runs afterwards; None to have them made.

        Returns:
            Where differences are left, and the runs afterwards.
        """
        try:
            new = new or self.pair(how, now.rules)
        except Exception:  # this model does not run so: nothing is learned
            return left, now
        changed = [key for key in left if self._changed(key, now, new)]
        open_now = self.differ(new.rules, new.whole, left)
        still = [key for key in changed if key in open_now]
        outcome = "gone" if not still else "another one"
        if still and len(still) < len(changed):
            outcome = "gone or another one"
        for key in changed:
            self.found[key].append(make(outcome))
        self.how = how
        return open_now, new

    def _changed(self, key: Key, before: Pair, after: Pair) -> bool:
        if key not in after.whole or key not in after.rules:
            return True
        arrays = [p[key] for p in (before.rules, before.whole, after.rules)]
        if len({x.shape for x in (*arrays, after.whole[key])}) > 1:
            return self.tolerance.equal(after.rules[key], after.whole[key])
        gaps = [
            p.rules[key].astype(float) - p.whole[key].astype(float)
            for p in (before, after)
        ]
        scale = float(np.abs(before.whole[key].astype(float)).max(initial=0.0))
        limit = self.tolerance.atol + self.tolerance.rtol * scale
        return not bool(np.abs(gaps[0] - gaps[1]).max(initial=0.0) <= limit)

    def _precision(self, sharded: Run, now: Pair, keys: list[Key]) -> Run:
        """Without policies, if they are what the sharded numbers differ by."""
        if not self.subject.has_policies():
            return sharded
        away = self.differ(sharded, now.rules, keys)
        if not away:
            return sharded
        plain = run_sharded(self.subject, policies=False)
        limit = _ROUNDINGS * self._policy_eps()
        for key in away:
            if key not in sharded or key not in plain:
                continue
            gap = self.tolerance.difference(sharded[key], plain[key])
            if not gap.equal and gap.relative <= limit:
                self.found[key].append(findings.mixed_precision())
            elif not gap.equal:
                plain[key] = sharded[key]  # too far for rounding: stays a fault
        return plain

    def _policy_eps(self) -> float:
        policies = [state_of(m).mp_policy for m in self.subject.modules]
        dtypes = [
            d for p in policies for d in (p.param_dtype, p.reduce_dtype, p.output_dtype)
        ]
        return max((float(jnp.finfo(d).eps) for d in dtypes if d), default=0.0)

    def _random(self, left: list[Key], now: Pair) -> tuple[Finding | None, list, Pair]:
        """Masks of one's own: switched off where modules can be."""
        subject = self.subject
        if not left:
            return None, left, now
        streams = any(issubclass(s.kind, nnx.RngState) for s in subject.slots)
        if streams or subject.linen is not None:
            off = dataclasses.replace(self.how, dropout=False)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                still = self.whole(off)
            told = [k for k in still if k[0] in ("loss", "gradient", "output")]
            if self.differ(still, now.whole, told):
                left, now = self._step(off, findings.random_streams, left, now)
            counts = [
                leaf.key
                for leaf in now.replay.leaves.values()
                if leaf.kind is not None and issubclass(leaf.kind, nnx.RngCount)
                if leaf.at is not None
                and not np.array_equal(now.whole[leaf.key], subject.state[leaf.at].data)
            ]
            if counts and left:
                return findings.draws(counts[0][1]), left, now
        for i, (held, label) in enumerate(zip(subject.arrays, subject.labels)):
            raw = held.data.dtype == np.uint32 and held.data.shape[-1:] == (2,)
            if left and (raw or held.impl is not None):
                arrays = list(subject.arrays)
                arrays[i] = dataclasses.replace(held, data=held.data + np.uint32(1))
                if self.differ(self.whole(self.how, arrays), now.whole, left):
                    return findings.key_argument(label), left, now
        return None, left, now

    def _cut(self, left: list[Key], now: Pair) -> tuple[list[Key], Pair]:
        """Arguments that are cut and are no batch, or not along the dim that is cut."""
        for placing in self.placings():

            def make(outcome: str, placing: Placing = placing) -> Finding:
                told = f"the difference is {outcome}"
                return findings.cut_argument(self.subject, placing, told)

            left, now = self._step(self._placed(placing), make, left, now)
        return left, now

    def _placed(self, placing: Placing) -> Variation:
        return dataclasses.replace(self.how, specs=placing.specs)

    def placings(self) -> list[Placing]:
        """Arguments that an experiment on the twin finds to be cut wrongly."""
        return find_batch(
            self.subject,
            lambda arrays: self.whole(self.how, arrays),
            self.tolerance,
        )

    def _batch_norm(self, left: list[Key], now: Pair) -> tuple[list[Key], Pair]:
        if not any(issubclass(s.kind, nnx.BatchStat) for s in self.subject.slots):
            return left, now
        how = dataclasses.replace(self.how, batch_norm=True)
        axes = self.subject.mesh.data_axes
        return self._step(how, lambda o: findings.batch_norm(axes, o), left, now)

    def _slices(self, left: list[Key], now: Pair) -> tuple[list[Key], Pair]:
        if self.subject.request.num_microbatches == 1:
            return left, now
        how = dataclasses.replace(self.how, num_slices=1)
        return self._step(how, findings.micro_batches, left, now)

    def _factors(self, left: list[Key], now: Pair) -> tuple[list[Key], Pair]:
        set_here = any(state_of(m).gradient_divide_factor for m in self.subject.modules)
        gradients = [k for k in left if k[0] == "gradient"]
        if not set_here or not gradients:
            return left, now
        plain = dataclasses.replace(
            now, rules=join(self.subject, now.replay, now.rules, factors=False)
        )
        return self._step(self.how, findings.divide_factor, left, now, plain)

    def _last(self, left: list[Key], now: Pair, drawing: Finding | None) -> None:
        """What remains is what the function itself makes of some of the rows."""
        fitted = None
        of_loss = [k for k in left if k[0] in ("loss", "gradient")]
        if of_loss and drawing is None:
            fitted = fit(self.subject, now.replay, now.whole, self.tolerance)
        for key in left:
            if drawing is not None:
                self.found[key].append(drawing)
            elif key in of_loss:
                self.found[key].append(findings.loss(self.subject, fitted))
            else:
                leaf = now.replay.leaves[key]
                self.found[key].append(
                    findings.joined(
                        self.subject,
                        leaf,
                        now.replay.arrays[key],
                        now.whole[key],
                        self.tolerance,
                        fitted,
                    )
                )

    # --- what equal numbers hide --------------------------------------------------

    def probe(self, whole: Run) -> list[str]:
        """What would differ with the same rows in another order, in words."""
        subject = self.subject
        specs = subject.specs or []
        cut = [i for i, s in enumerate(specs) if s == subject.mesh.data_spec()]
        sizes = {subject.arrays[i].shape[0] for i in cut}
        if len(sizes) != 1 or ("loss", "") not in whole:
            return []
        (size,) = sizes
        order = np.random.default_rng(0).permutation(size)
        arrays = list(subject.arrays)
        for i in cut:
            arrays[i] = dataclasses.replace(arrays[i], data=arrays[i].data[order])
        replay, loss = self.lab.replay(self.how, arrays), [("loss", "")]
        rules = join(subject, replay, whole)
        other = self.whole(self.how, arrays)
        if not self.differ(rules, other, loss) or self.differ(other, whole, loss):
            return []
        finding = findings.loss(subject, fit(subject, replay, other, self.tolerance))
        return [
            "equal by chance. With the same rows in another order the numbers differ, "
            f"{finding.rule}: {finding.reason} {finding.advice}"
        ]


def told_of_knobs(subject: Any) -> list[str]:
    """Settings that `check` does not look at, in words."""
    off = [
        m
        for m in subject.modules
        if not (state_of(m).requires_gradient_sync and state_of(m).requires_all_reduce)
    ]
    if not off:
        return []
    return ["gradient sync is off for a group; it was checked as if it were on."]
