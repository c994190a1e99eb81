"""Reads from tokenizer.json what decides where a text may be cut without changing its ids.

A tokenizer normalises a run of text, splits it into pre-tokens and applies its model to each of them. A cut
is safe where no pre-token, merge or composition can reach across it, whatever follows. Three kinds of
tokenizer are understood; any other is never cut within a run:

* ``PRETOKENS``: byte-level, split by a known regular expression that looks at most one pre-token ahead;
* ``SPACES``: SentencePiece style, every space begins a pre-token;
* ``PAIRS``: SentencePiece style BPE over a whole run; a merge reaches over a cut only if some token of the
  vocabulary holds the two characters around it.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import tokenizers

SPACE_MARK = "▁"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPLIT = _CL100K % "{1,3}"
QWEN2_SPLIT = _CL100K % ""
_KNOWN_SPLITS = frozenset({_GPT2, LLAMA3_SPLIT, QWEN2_SPLIT})
_BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))

Spec = Mapping[str, Any]  # a component of tokenizer.json


class CutKind(Enum):
    """How a run of text may be cut; see the module."""

    WHOLE = auto()
    PRETOKENS = auto()
    SPACES = auto()
    PAIRS = auto()


class PrefixSpace(Enum):
    """Where the tokenizer puts a space before a run of text."""

    NEVER = auto()
    FIRST = auto()  # only before a run that begins the prompt
    ALWAYS = auto()  # before every run between control tokens


@dataclass(frozen=True, slots=True)
class TokenizerLayout:
    """What :class:`~parrot.tokenizer.segments.PromptEncoder` must know about a tokenizer."""

    cut_kind: CutKind
    prefix_space: PrefixSpace
    composes: bool  # PRETOKENS: the normaliser composes characters (NFC)
    joinable: frozenset[str]  # PAIRS: two-character strings that occur inside tokens
    known_chars: frozenset[str] | None  # PAIRS: only between these may a cut fall; None: anywhere
    control_ids: Mapping[str, int]
    stripping: frozenset[str]  # control strings that swallow the white space after them

    def control_pattern(self) -> re.Pattern[str]:
        """Matches any control string, the longest where several begin; one group."""
        longest_first = sorted(self.control_ids, key=len, reverse=True)
        return re.compile("(" + ("|".join(map(re.escape, longest_first)) or "(?!)") + ")")


def literal_backends(
    spec: Spec, chat_template: str
) -> tuple[TokenizerLayout, tokenizers.Tokenizer, tokenizers.Tokenizer]:
    """The layout, and two tokenizers for literal text: for the start of a run and for its middle.

    Neither finds control strings in text. The flag for that belongs to a tokenizer object, so these are
    objects of their own, never changed after this.
    """
    changed = copy.deepcopy(dict(spec))
    changed.update(post_processor=None, truncation=None, padding=None)
    control: dict[str, int] = {}
    has_text_tokens = False
    for token in changed.get("added_tokens") or []:
        if token["special"] or _looks_like_control(token["content"], chat_template):
            control[token["content"]] = token["id"]
            token["special"] = True
        else:
            has_text_tokens = True
    stripping = {t["content"] for t in changed.get("added_tokens") or [] if t["special"] and t["rstrip"]}
    layout = _layout(changed, control, frozenset(stripping), has_text_tokens)
    literal = _literal(changed)
    if layout.prefix_space is PrefixSpace.NEVER:
        return layout, literal, literal
    return layout, literal, _literal(_without_prefix_space(changed))


def _looks_like_control(content: str, chat_template: str) -> bool:
    """Added tokens that are not marked special but must not arise from user text (``<tool_call>``)."""
    return content.strip() != "" and (
        content in chat_template or re.fullmatch(r"<.+>|\[.+\]", content) is not None
    )


def _literal(spec: Spec) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer.from_str(json.dumps(spec))
    backend.encode_special_tokens = True
    return backend


def _without_prefix_space(spec: Spec) -> Spec:
    changed = copy.deepcopy(dict(spec))
    normalizers = [n for n in _members(changed.get("normalizer"), "normalizers") if n["type"] != "Prepend"]
    changed["normalizer"] = {"type": "Sequence", "normalizers": normalizers} if normalizers else None
    for step in _members(changed.get("pre_tokenizer"), "pretokenizers"):
        if step["type"] == "ByteLevel":
            step["add_prefix_space"] = False
        elif step["type"] == "Metaspace":
            step.pop("add_prefix_space", None)
            step["prepend_scheme"] = "never"
    return changed


def _members(component: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """A normaliser or pre-tokenizer as the list of its steps."""
    if component is None:
        return []
    return component[key] if component["type"] == "Sequence" else [component]


def _layout(
    spec: Spec, control: Mapping[str, int], stripping: frozenset[str], has_text_tokens: bool
) -> TokenizerLayout:
    normalizers = _members(spec.get("normalizer"), "normalizers")
    steps = _members(spec.get("pre_tokenizer"), "pretokenizers")
    kind = CutKind.WHOLE if has_text_tokens else _cut_kind(spec["model"], normalizers, steps)
    pairs = kind is CutKind.PAIRS or (kind is CutKind.SPACES and _merges_stay_in_pairs(spec["model"]))
    return TokenizerLayout(
        cut_kind=CutKind.PAIRS if pairs else kind,
        prefix_space=_prefix_space(normalizers, steps),
        composes=bool(normalizers) and kind is CutKind.PRETOKENS,
        joinable=_joinable(spec["model"]) if pairs else frozenset(),
        known_chars=_known_chars(spec["model"]) if pairs else None,
        control_ids=control,
        stripping=stripping,
    )


def _cut_kind(model: Spec, normalizers: list[dict[str, Any]], steps: list[dict[str, Any]]) -> CutKind:
    if model.get("dropout"):
        return CutKind.WHOLE
    if _splits_bytes(steps):
        composes = [n["type"] for n in normalizers]
        return CutKind.PRETOKENS if composes in ([], ["NFC"]) else CutKind.WHOLE
    metaspace = [step for step in steps if step["type"] == "Metaspace"]
    if metaspace and len(steps) == 1 and not normalizers and metaspace[0]["replacement"] == SPACE_MARK:
        if metaspace[0].get("split", True):
            return CutKind.SPACES
        return CutKind.PAIRS if _merges_stay_in_pairs(model) else CutKind.WHOLE
    if not steps and _marks_spaces(normalizers) and _merges_stay_in_pairs(model):
        return CutKind.PAIRS
    return CutKind.WHOLE


def _splits_bytes(steps: list[dict[str, Any]]) -> bool:
    """[Digits]* then one known regular expression, as a Split or within ByteLevel."""
    if not steps or steps[-1]["type"] != "ByteLevel":
        return False
    last, rest = steps[-1], steps[:-1]
    if last.get("use_regex", True):
        regexes_known = True
    else:
        regexes_known = bool(rest) and _is_known_split(rest[-1])
        rest = rest[:-1]
    only_digits = all(step["type"] == "Digits" for step in rest)
    prefix_understood = not last["add_prefix_space"] or len(steps) == 1
    return regexes_known and only_digits and prefix_understood


def _is_known_split(step: Spec) -> bool:
    return (
        step["type"] == "Split"
        and step["pattern"].get("Regex") in _KNOWN_SPLITS
        and step["behavior"] == "Isolated"
        and not step["invert"]
    )


def _marks_spaces(normalizers: list[dict[str, Any]]) -> bool:
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
    prepend = {"type": "Prepend", "prepend": SPACE_MARK}
    return normalizers in ([replace], [prepend, replace])


def _merges_stay_in_pairs(model: Spec) -> bool:
    """Whether the model is a BPE in which only a merge can join characters, and a merge only makes tokens."""
    return (
        model["type"] == "BPE"
        and not model.get("ignore_merges")
        and not model.get("continuing_subword_prefix")
        and not model.get("end_of_word_suffix")
        and not any(token.startswith("<0x") and token not in _BYTE_TOKENS for token in model["vocab"])
    )


def _joinable(model: Spec) -> frozenset[str]:
    tokens = (token for token in model["vocab"] if token not in _BYTE_TOKENS)
    return frozenset(token[i : i + 2] for token in tokens for i in range(len(token) - 1))


def _known_chars(model: Spec) -> frozenset[str] | None:
    """Unknown characters may vanish, or become one token with their neighbours, unless they fall back to
    bytes or to one unknown token each."""
    falls_back = model.get("byte_fallback") and model["vocab"].keys() >= _BYTE_TOKENS
    if falls_back or (model.get("unk_token") and not model.get("fuse_unk")):
        return None
    return frozenset(token for token in model["vocab"] if len(token) == 1)


def _prefix_space(normalizers: list[dict[str, Any]], steps: list[dict[str, Any]]) -> PrefixSpace:
    if any(n["type"] == "Prepend" for n in normalizers):
        return PrefixSpace.ALWAYS
    for step in steps:
        if step["type"] == "ByteLevel" and step["add_prefix_space"]:
            return PrefixSpace.ALWAYS
        if step["type"] == "Metaspace":
            default = "always" if step.get("add_prefix_space", True) else "never"
            return PrefixSpace[step.get("prepend_scheme", default).upper()]
    return PrefixSpace.NEVER
