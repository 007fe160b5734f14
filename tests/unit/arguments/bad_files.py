"""Files that a command line may name by mistake: datasets that cannot be trained on, and plugins without a reward."""

from __future__ import annotations

import json


def _row(**columns: object) -> str:
    return json.dumps({"letters": "a", **columns})


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


_GOOD = [_row(messages=_user("spell a")), _row(messages=_user("spell b"))]
_REWARD_CLASSES = [
    ("no_call.py", "", "def score(self, completions): return [0.0]"),
    ("no_call_of_orm.py", "(ORM)", "pass"),
    ("no_kwargs.py", "", "def __call__(self, completions, **kwargs): return [0.0]"),
    ("no_columns.py", "(ORM)", "def __call__(self, completions): return [0.0]"),
    ("needs_more.py", "", "def __init__(self, args, key): pass\n    def __call__(self, completions, **kwargs): pass"),
]
FILES = {
    "empty.jsonl": "",
    "truncated.jsonl": "\n".join([*_GOOD, '{"messages": [{"role": "us']),
    "comma.jsonl": "\n".join(line + "," for line in _GOOD),
    "text.jsonl": "spell a\nspell b\n",
    "no_prompt.jsonl": "\n".join(_row(prefix="spell a", letters="a") for _ in range(4)),
    "no_role.jsonl": "\n".join([*_GOOD, _row(messages=[{"content": "spell c"}])]),
    "null_content.jsonl": "\n".join([*_GOOD, _row(messages=[{"role": "user", "content": None}])]),
    "string_messages.jsonl": "\n".join(_row(messages="spell a") for _ in range(4)),
    "list_messages.jsonl": "\n".join(_row(messages=["spell a"]) for _ in range(4)),
    "no_messages.jsonl": "\n".join([*_GOOD, _row(messages=[])]),
    "only_assistant.jsonl": "\n".join(_row(messages=[{"role": "assistant", "content": "a"}]) for _ in range(4)),
    "mixed.jsonl": "\n".join([*_GOOD, _row(query="spell c")]),
    "turns.jsonl": "\n".join(
        _row(messages=[*_user("a"), {"role": "assistant", "content": "b"}, *_user("c")]) for _ in range(8)
    ),
    "few.jsonl": _GOOD[0],
    "long.jsonl": "\n".join(_row(messages=_user("spell " * 99)) for _ in range(8)),
    "twice.jsonl": "\n".join([*_GOOD, '{"query": "a", "query": "b"}']),
    "half.jsonl": "\n".join([*_GOOD, '{"query": "\\ud800"}']),
    "blank.jsonl": "\n\n\n",
    "number.jsonl": "\n".join([*_GOOD, _row(messages=[{"role": "user", "content": 7}])]),
    "tool_first.jsonl": "\n".join([*_GOOD, _row(messages=[{"role": "tool", "content": "4"}, *_user("spell c")])]),
    "parts.jsonl": "\n".join(
        _row(messages=[{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]) for _ in range(4)
    ),
    "column_text.jsonl": "\n".join(_row(text="spell a") for _ in range(4)),
    "lines.txt": "spell a\nspell b\n",
    "strings.json": '["spell a", "spell b"]',
    "mixed.json": '[{"query": "spell a"}, "spell b"]',
    "long.csv": "query,letters\nspell a, b,c\n",
    "short.csv": "query,letters\nspell a,a\nspell b\n",
    "numbers.jsonl": "\n".join(_row(messages=_user("1 + 1"), solution=2) for _ in range(4)),
    **dict.fromkeys(("rows.tsv", "rows.jsonl.gz", "rows.xyz", "rows"), _GOOD[0]),
    "cut.parquet": "PAR1 and no more",
    "broken.py": "import no_such_module\n",
    "plain.py": "from swift.rewards import orms\n\ndef plain(completions, **kwargs):\n    return [0.0]\n\n"
    "orms['plain'] = plain\n",
    "exits.py": "import sys\n\nsys.exit(2)\n",
    "parses.py": "import argparse\n\nparser = argparse.ArgumentParser()\nparser.add_argument('--mine')\n"
    "parser.parse_args()\n",
    **{
        name: f"from swift.rewards import ORM, orms\n\nclass Mine{base}:\n    {body}\n\norms['mine'] = Mine\n"
        for name, base, body in _REWARD_CLASSES
    },
    "not_callable.py": "from swift.rewards import orms\n\norms['value'] = 3\n",
}
