"""Wordings that no lesson should hold, or that make a text suspect; compiled once.

Patterns find the plain forms in English and a few in Chinese. Does not know what follows from a
find (`guards` decides). Source: own, from published prompt-injection and secret-scanning lists'
categories.
"""

from __future__ import annotations

import re


def _any(*alternatives: str) -> re.Pattern[str]:
    return re.compile("|".join(alternatives), re.IGNORECASE)


PERSONAL = {
    "an e-mail address": re.compile(r"(?<![\w.+-])[\w.+-]+@[\w-]+\.[\w.-]*\w"),
    "a key or token": re.compile(
        r"\b(?:sk|pk|rk|ghp|gho|xox[abp]|hf|AKIA|AIza|eyJ)[-_]?[A-Za-z0-9_\-]{12,}"
        r"|-----BEGIN [A-Z ]*KEY-----"
        r"|\b(?=\w*\d)(?=\w*[A-Za-z])[A-Za-z0-9+/_]{28,}\b"
    ),
    "a long number": re.compile(r"(?<![\d.])(?!\d{4}-\d\d-\d\d(?!\d))\d(?:[ \-]?\d){5,}(?![\d.])"),
}
"""Personal or secret data: a lesson with any is refused."""

IGNORE_ORDER = _any(
    r"\b(?:ignore|disregard|forget|override|bypass|skip)\b[^.\n]{0,40}"
    r"\b(?:previous|prior|above|earlier|all|any|other|system|these|those|your|safety)\b[^.\n]{0,40}"
    r"\b(?:instructions?|rules?|prompts?|messages?|guidelines?|lessons?|checks?|polic(?:y|ies))\b",
    r"\b(?:ignore|disregard|forget|override|bypass)\b[^.\n]{0,20}\b(?:instructions?|rules?|prompts?"
    r"|guidelines?)\b[^.\n]{0,20}\b(?:above|before|earlier|so far)\b",
    r"忽略[^。\n]{0,12}(?:指令|指示|规则|提示)",
)
ROLE_CLAIM = _any(
    r"\byou are (?:now|no longer)\b",
    r"\bact as (?:an?|the)\b",
    r"\bpretend (?:to be|that)\b",
    r"\bnew system prompt\b",
    r"(?:^\s*|\n[^\S\n]*)(?:system|assistant|user|developer)\s*:",
    r"<\|?\s*(?:im_start|im_end|system|endoftext)",
    r"\[/?(?:INST|SYS)\]",
    r"\bas (?:the|your) (?:system|administrator|developer)\b",
)
HOLD = {
    "a web address": _any(r"(?:https?|ftp|file|data|javascript):\S", r"\bwww\.\w"),
    "a command": _any(
        r"\b(?:sudo|curl|wget|chmod|chown|powershell|mkfs)\b",
        r"\brm\s+-\w",
        r"\b(?:eval|exec)\s*\(|\bos\.system\b|\bsubprocess\b",
        r"\b(?:pip3?\s+install|npm\s+i(?:nstall)?\b|ssh\s+\S+@|base64\s+-d)",
        r"\$\([^)]|\|\s*(?:ba)?sh\b|&&\s*\w|\bDROP\s+TABLE\b",
    ),
    "a request for secrets": _any(
        r"\b(?:passwords?|passphrases?|credentials?|api[\s_-]?keys?|secret[\s_-]?keys?)\b",
        r"\b(?:private keys?|access[\s_-]?tokens?|auth(?:entication)? tokens?|ssn|credit card)\b",
        r"\.env\b|密码|口令",
    ),
    "an order to ignore instructions": IGNORE_ORDER,
    "a role claim": ROLE_CLAIM,
    "a tool call": _any(
        r"<\s*(?:/\s*)?(?:tool_call|function_call|tool|invoke)\b",
        r"\"(?:tool_calls?|arguments|function)\"\s*:",
        r"\bfunction_call\b",
    ),
}
"""A lesson with any of these waits for a person."""

MEMORY_ORDER = _any(
    r"\b(?:add|save|store|write|append|record|put|keep|commit)\b[^.\n]{0,60}"
    r"\b(?:memory|memories|lessons?|library|experiences?|rules?|notes?|knowledge|playbook)\b",
    r"\b(?:remember|memori[sz]e|from now on|for all (?:future|later))\b",
    r"\bin (?:all )?future (?:tasks|runs|answers)\b",
    r"\b(?:important|note|attention|message|instructions?) (?:to|for) (?:the |all |any )?"
    r"(?:ai|assistants?|agents?|models?|llms?|critics?)\b",
    r"记住|添加到(?:记忆|经验)|加入(?:记忆|经验)",
)
"""Text that asks to be remembered."""

MEMORY_WORD = _any(r"memor(?:y|ies)", r"\blibrary\b", "记忆")

NAME = re.compile(r"(?<=[\w,;:\-] )(?:[A-Z][\w\-]+|\w*\d\w*)")
"""A capitalised word inside a sentence, or a word with a digit: mostly a name or a code."""

STOP_WORDS = frozenset(
    """a an and are as at be before but by for from has have if in into is it its not of on or so
    that the their them then this to use using when whenever with you your always never any all do
    does must should""".split()  # noqa: SIM905
)
