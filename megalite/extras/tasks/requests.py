"""From a task's documents to what is scored, and from scores to its metrics, by lm-eval's rules."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any

import jinja2
import jinja2.sandbox
import numpy as np

from megalite.core.base.errors import UserError, describe, require
from megalite.extras.tasks.read import Doc, Task
from megalite.runtime.data.tokenizer import Tokenizer

# lm-eval's seed of few-shot examples.
_EXAMPLE_SEED = 1234

# What a template or a value of a document can raise.
_FAILURES = (
    jinja2.TemplateError,
    re.error,
    ArithmeticError,
    LookupError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
)

Document = tuple[list[int], int]
"""Token ids, and how many of the last of them are scored."""


@dataclass(frozen=True)
class Question:
    """A document of a task as it is scored.

    Attributes:
        pairs: (context, continuation) of each log-likelihood; a whole text has the context None.
        gold: numbers of the right choices.
        sizes: characters and UTF-8 bytes of each choice; words and bytes of a whole text.
        context, target: of generation, what is continued and the right answer.
    """

    pairs: list[tuple[str | None, str]]
    gold: tuple[int, ...] = ()
    sizes: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    context: str = ""
    target: str = ""


def questions(task: Task) -> list[Question]:
    """Make the questions of a task.

    Raises:
        UserError: a template fails, or gives what a task of its kind cannot use.
    """
    writer, drawn = _Writer(task), Random(_EXAMPLE_SEED)
    out = []
    for number, doc in enumerate(task.docs):
        given = f"task {task.name}, document {number}"
        try:
            out.append(writer.question(doc, drawn))
            for context, text in out[-1].pairs:
                # A half of a surrogate pair, which JSON can hold, has no bytes for a tokenizer.
                f"{context}{text}".encode()
            f"{out[-1].context}{out[-1].target}".encode()
        except _FAILURES as e:
            rule = f"doc_to_text, doc_to_choice or doc_to_target fails ({describe(e)})"
            raise UserError(given, rule, "correct the task's file or its data") from e
    return out


class _Writer:
    """Writes the texts of a task's documents."""

    def __init__(self, task: Task) -> None:
        self.task = task
        # Templates come with files of others.
        self._jinja = jinja2.sandbox.ImmutableSandboxedEnvironment(
            undefined=jinja2.StrictUndefined, keep_trailing_newline=True
        )
        self._jinja.filters["regex_replace"] = lambda text, pattern, by, count=0: re.sub(pattern, by, text, count=count)

    def question(self, doc: Doc, drawn: Random) -> Question:
        task = self.task
        if task.kind == "loglikelihood_rolling":
            text = _text(self._field(doc, task.target, lists=True))
            return Question([(None, text)], sizes=((len(re.split(r"\s+", text)),), (len(text.encode()),)))
        before, question = self._before(doc, drawn), self._question(doc)
        if task.kind == "loglikelihood":
            return Question([(before + _text(question), _text(self._field(doc, task.target, lists=True)))])
        if task.kind == "generate_until":
            target = self._field(doc, task.target, lists=True)
            if target is None or isinstance(target, (list, dict)):
                raise TypeError(f"the answer {target!r} is no text")
            return Question([], context=before + _text(question), target=str(target))
        choices, target = self._choices(doc), self._field(doc, task.target, lists=True)
        if self._by_choice:
            # Each choice is a context of its own, and the answer is what follows.
            pairs = [(before + choice, f"{task.target_delimiter}{target}") for choice in choices]
            target = question
        else:
            pairs = [(before + _text(question), f"{task.target_delimiter}{choice}") for choice in choices]
        if "acc_mutual_info" in task.metrics:
            pairs += [("", f"{task.target_delimiter}{choice}") for choice in choices]
        right = target if isinstance(target, list) else [target]
        gold = [choices.index(g) if isinstance(g, str) and g in choices else g for g in right]
        if not all(isinstance(g, int) and 0 <= g < len(choices) for g in gold):
            raise ValueError(f"the answer {target!r} is not one of the {len(choices)} choices")
        sizes = tuple(map(len, choices)), tuple(len(choice.encode()) for choice in choices)
        return Question([(context, text) for context, text in pairs], tuple(gold), sizes)

    def _before(self, doc: Doc, drawn: Random) -> str:
        """Write what stands before the question: the description and the examples."""
        task = self.task
        text = doc[task.description] if task.description in doc else self._render(task.description, doc)
        return _text(text) + "".join(self._example(example) for example in self._examples(doc, drawn))

    def _examples(self, doc: Doc, drawn: Random) -> list[Doc]:
        task, n = self.task, self.task.num_fewshot
        if not n:
            return []
        if task.first_examples:
            return [x for x in task.examples if not task.excludes_own or x != doc][:n]
        if not task.excludes_own:
            return drawn.sample(task.examples, n)
        found = [x for x in drawn.sample(task.examples, n + 1) if x != doc][:n]
        return found if len(found) == n else drawn.sample([x for x in task.examples if x != doc], n)

    def _example(self, doc: Doc) -> str:
        task = self.task
        question, answer = self._question(doc), self._field(doc, task.target, lists=True)
        choices = self._choices(doc) if task.choice else None
        if self._by_choice and choices is not None:
            question, choices = choices[question], None
        if answer is None or answer == "":
            return _text(question)
        if choices is not None and isinstance(answer, int):
            answer = choices[answer]
        elif isinstance(answer, list):
            answer = answer[0]
        return _text(question) + task.target_delimiter + _text(answer) + task.fewshot_delimiter

    @cached_property
    def _by_choice(self) -> bool:
        """Whether questions are numbers of choices: of all documents or of none, by the first, as in lm-eval."""
        return isinstance(self._field(self.task.docs[0], self.task.text), int)

    def _question(self, doc: Doc) -> Any:
        question = self._field(doc, self.task.text)
        if isinstance(question, int) != self._by_choice:
            kinds = ("no number", "one") if self._by_choice else ("a number", "none")
            raise ValueError(f"the question {question!r} is {kinds[0]}, that of document 0 is {kinds[1]}")
        return question

    def _choices(self, doc: Doc) -> list[str]:
        choice = self.task.choice
        if isinstance(choice, dict):
            choice = list(choice.values())
        if isinstance(choice, str):
            choice = doc[choice] if choice in doc else ast.literal_eval(self._render(choice, doc))
        if not isinstance(choice, list) or not choice or not all(isinstance(text, str) for text in choice):
            raise ValueError(f"doc_to_choice gives {choice!r}, which is no list of texts")
        return choice

    def _field(self, doc: Doc, template: Any, lists: bool = False) -> Any:
        """Return what a field or a template says of a document: a text, a number of a choice, or a list."""
        if not isinstance(template, str):
            return template
        if template in doc:
            return doc[template]
        text = self._render(template, doc)
        if text.isdigit() and self.task.choice is not None:
            return ast.literal_eval(text)
        if lists and text[:1] == "[" and text[-1:] == "]":
            try:
                return ast.literal_eval(text)
            except (SyntaxError, ValueError):
                return text
        return text

    def _render(self, template: str, doc: Doc) -> str:
        return self._jinja.from_string(template).render(**doc)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


# ----------------------------------------------------------------------------------------------------------- tokens


def documents_of(question: Question, tokenizer: Tokenizer, longest: int, name: str) -> Iterator[list[Document]]:
    """Encode a question: for each of its pairs the token sequences whose log-probabilities are summed.

    A context that is too long loses tokens on the left, an empty one is the end of the text before, as in training. A
    whole text has windows that do not overlap.

    Args:
        question: the question.
        tokenizer: the tokenizer, with an end of text.
        longest: most tokens that the model reads at once.
        name: of the task, for messages.

    Raises:
        UserError: a continuation has no token, or more than `longest`.
    """
    assert tokenizer.eos_id is not None
    start = [tokenizer.eos_id]
    for context, text in question.pairs:
        if context is None:
            ids = start + tokenizer.encode(text)
            ends = [min(i + longest, len(ids) - 1) for i in range(0, len(ids) - 1, longest)]
            # The last has as much context as fits.
            yield [(ids[max(end - longest, 0) : end + 1], (end - 1) % longest + 1) for end in ends]
            continue
        bare = context.rstrip()
        whole = tokenizer.encode(context + text)
        before = len(tokenizer.encode(bare)) if bare else 0
        n = len(whole) - before
        # As lm-eval does: a text that begins with the end of text is its own context.
        ids = whole if before or (context == "" and whole[:1] == start) else start + whole
        n -= ids is whole and not before
        rule = f"a continuation of {n} tokens must have 1 to {longest} (--seq-len)"
        require(0 < n <= longest, f"task {name}", rule, "leave the task out")
        yield [(ids[-longest - 1 :], n)]


# ---------------------------------------------------------------------------------------------------------- metrics


def metrics_of(
    task: Task, asked: Sequence[Question], answers: Sequence[Sequence[tuple[float, bool]]]
) -> dict[str, float]:
    """Compute a task's metrics by lm-eval's names.

    Args:
        task: the task.
        asked: its questions.
        answers: for each, the log-likelihood of its pairs, and whether each was greedy.

    Returns:
        Metric -> value; a mean over more than one document has its standard error as `acc_stderr`.
    """
    if task.kind == "loglikelihood_rolling":
        total = sum(pair[0] for pairs in answers for pair in pairs)
        words, size = (sum(question.sizes[i][0] for question in asked) for i in (0, 1))
        figures = {
            "word_perplexity": _exp(-total / words),
            "byte_perplexity": _exp(-total / max(size, 1)),
            "bits_per_byte": -total / max(size, 1) / math.log(2),
        }
        return {name: figures[name] for name in task.metrics}
    if task.kind == "loglikelihood":
        rows = [{"perplexity": pairs[0][0], "acc": float(pairs[0][1])} for pairs in answers]
    else:
        rows = [_judged(question, pairs) for question, pairs in zip(asked, answers, strict=True)]
    return mean_of(task.metrics, rows)


def mean_of(names: Sequence[str], rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Average metrics of documents, with standard errors."""
    out: dict[str, float] = {}
    for name in names:
        values = [row[name] for row in rows]
        mean = sum(values) / len(values)
        out[name] = _exp(-mean) if name == "perplexity" else mean
        if name != "perplexity" and len(values) > 1:
            spread = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
            metric, comma, pipeline = name.partition(",")
            out[f"{metric}_stderr{comma}{pipeline}"] = math.sqrt(spread / len(values))
    return out


def _judged(question: Question, pairs: Sequence[tuple[float, bool]]) -> dict[str, float]:
    """Judge one question of multiple choice: the first of equal choices counts as chosen."""
    n, gold = len(question.sizes[0]), question.gold
    logprobs = np.array([pair[0] for pair in pairs[:n]])
    characters, size = (np.array(sizes, dtype=float) for sizes in question.sizes)
    with np.errstate(divide="ignore", invalid="ignore"):
        scores = {"acc": logprobs, "acc_norm": logprobs / characters, "acc_bytes": logprobs / size}
    if len(pairs) > n:
        scores["acc_mutual_info"] = logprobs - np.array([pair[0] for pair in pairs[n:]])
    judged = {name: float(int(np.argmax(score)) in gold) for name, score in scores.items()}
    return judged | {"exact_match": float(any(pairs[g][1] for g in gold))}


def _exp(x: float) -> float:
    return math.exp(min(x, 700.0))
