"""How texts of a task end, are filtered and judged: by the rules of lm-eval 0.4.13."""

from __future__ import annotations

import re
import string
from dataclasses import dataclass
from typing import Any

from megalite.core.base.errors import require

MATCH_OPTIONS = ("ignore_case", "ignore_punctuation", "ignore_numbers", "regexes_to_ignore")
_MOST = 256
_REMEDY = "leave it out, or evaluate the checkpoint with megalite lm-eval"


Filter = tuple[str, int, str]
"""Pattern, number of the match, and the text where there is none."""


@dataclass(frozen=True)
class Generation:
    """How a task's texts end and are judged.

    Attributes:
        until: texts that end one.
        most: maximum number of new tokens.
        pipelines: regex filters, in order, of each pipeline by its name; without any pipeline one of the name "".
        match: options of exact_match.
    """

    until: tuple[str, ...]
    most: int
    pipelines: dict[str, tuple[Filter, ...]]
    match: dict[str, Any]

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of its metrics, `exact_match,NAME` for a pipeline, as in lm-eval."""
        return tuple(f"exact_match,{name}" if name else "exact_match" for name in self.pipelines)

    def judged(self, text: str, target: str) -> dict[str, float]:
        """Filter a text by each pipeline and compare it with the right answer: metric -> 1 or 0."""
        found = (self._bare(_filtered(text, filters)) for filters in self.pipelines.values())
        return {name: float(bare == self._bare(target)) for name, bare in zip(self.metrics, found)}

    def _bare(self, text: str) -> str:
        for pattern in self.match.get("regexes_to_ignore") or ():
            text = re.sub(pattern, "", text)
        if self.match.get("ignore_case"):
            text = text.lower()
        dropped = string.punctuation if self.match.get("ignore_punctuation") else ""
        dropped += string.digits if self.match.get("ignore_numbers") else ""
        return text.translate(str.maketrans("", "", dropped))


def _filtered(text: str, filters: tuple[Filter, ...]) -> str:
    for pattern, number, fallback in filters:
        found = re.findall(pattern, text)
        match = found[number] if found else fallback
        if isinstance(match, tuple):
            match = next((group for group in match if group), fallback)
        text = match.strip() if found else fallback
    return text


def read_generation(given: str, content: dict[str, Any], delimiter: str) -> Generation:
    """Read `generation_kwargs`, `filter_list` and the options of exact_match of a task file.

    Raises:
        UserError: they say what is not supported, as sampling.
    """
    options = content.get("generation_kwargs") or {}
    require(isinstance(options, dict), given, "generation_kwargs is no mapping", "correct it")
    until, most = options.get("until", delimiter), options.get("max_gen_toks", _MOST)
    until = [until] if isinstance(until, str) else until
    fine = isinstance(until, list) and all(isinstance(text, str) for text in until)
    require(fine, given, "generation_kwargs.until is no list of texts", "correct it")
    require(type(most) is int and most > 0, given, f"max_gen_toks {most} is no number from 1", "correct it")
    unknown = [str(key) for key in options if key not in ("until", "max_gen_toks", "do_sample", "temperature")]
    require(not unknown, given, f"generation_kwargs.{', '.join(unknown)} is not supported by --eval-tasks", _REMEDY)
    sampled = options["do_sample"] if "do_sample" in options else options.get("temperature")
    require(not sampled, given, "texts of --eval-tasks are greedy, and the task samples them", _REMEDY)
    match = {k: v for entry in content.get("metric_list") or () for k, v in entry.items() if k in MATCH_OPTIONS}
    patterns = match.get("regexes_to_ignore") or []
    fine = isinstance(patterns, list) and all(_is_pattern(pattern) for pattern in patterns)
    require(fine, given, "regexes_to_ignore is no list of patterns", "correct it")
    return Generation(tuple(filter(None, until)), most, _pipelines(given, content.get("filter_list")), match)


def _pipelines(given: str, entries: Any) -> dict[str, tuple[Filter, ...]]:
    if not entries:
        return {"": ()}
    fine = isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)
    names = [entry.get("name") for entry in entries] if fine else []
    fine = fine and all(isinstance(name, str) and name for name in names) and len({*names}) == len(names)
    require(fine, given, "filter_list is no list of pipelines, each with its own name", "correct it")
    return {entry["name"]: _filters(given, entry.get("filter")) for entry in entries}


def _filters(given: str, steps: Any) -> tuple[Filter, ...]:
    rule, out = "filter_list must have pipelines of filters regex and take_first", []
    require(isinstance(steps, list) and all(isinstance(step, dict) for step in steps), given, rule, _REMEDY)
    for step in steps:
        known = {"regex": ("function", "regex_pattern", "group_select", "fallback"), "take_first": ("function",)}
        name = step.get("function")
        require(isinstance(name, str) and all(k in known.get(name, ()) for k in step), given, rule, _REMEDY)
        if name == "regex":
            pattern, number = step.get("regex_pattern", r"#### (\-?[0-9\.\,]+)"), step.get("group_select", 0)
            fallback = step.get("fallback", "[invalid]")
            require(_is_pattern(pattern), given, f"regex_pattern {pattern} is no pattern", "correct it")
            # Another match need not be there.
            rule_of_match = f"group_select {number} is not 0 (the first match) or -1 (the last)"
            require(type(number) is int and number in (0, -1), given, rule_of_match, _REMEDY)
            require(isinstance(fallback, str), given, f"fallback {fallback} is no text", "put it in quotes")
            out.append((pattern, number, fallback))
    return tuple(out)


def _is_pattern(pattern: Any) -> bool:
    try:
        return isinstance(pattern, str) and bool(re.compile(pattern))
    except (re.error, RecursionError, OverflowError):
        return False
