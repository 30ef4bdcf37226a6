"""Candidate code in cells: right values pass, and nothing else does."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.verifiers.rows import said, task
from tfgrpo.errors import ConfigError
from tfgrpo.verifiers import Code
from tfgrpo.verifiers.code import Marking, code_in
from tfgrpo.verifiers.code.cell_runner import decode, encode

CASES = {
    "function": "f",
    "cases": [{"args": [2], "expected": 4}, {"args": [], "kwargs": {"x": 3}, "expected": 9}],
}
TESTS = {
    "tests": "import math\nassert f(2) == 4\nassert abs(f(3) - 9) < 1e-9\n"
    "def test_list():\n    assert [f(i) for i in range(3)] == [0, 1, 4]\n",
    "function": "f",
}

BWRAP = pytest.param(
    "bwrap", marks=pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is absent")
)


def code(level: str = "process", **options: Any) -> Code:
    return Code(level=level, i_understand=True, **({"timeout_s": 5.0} | options))  # type: ignore[arg-type]


async def reward(source: str, reference: Any, level: str = "process", **options: Any) -> float:
    answer = said(f"Here:\n```python\n{source}\n```\n")
    return (await code(level, **options).score(answer, task(reference))).reward


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 1, -1.5, "x", [1, [2]], (1, 2), {1, 2}, frozenset({3})),
        *({1: "a", (2,): [3]}, b"\x00", 1j, float("inf"), {}, [], ()),
    ],
)
def test_values_cross_the_line_unchanged(value: Any) -> None:
    got = decode(encode(value))
    assert got == value and type(got) is type(value)


def test_code_is_found_in_an_answer() -> None:
    assert code_in("```python\nx = 1") == "x = 1"
    assert code_in("x = 1") == "x = 1"
    assert code_in("```json\n{}\n```") is None
    assert code_in("") is None and code_in("No code here.") is None


@pytest.mark.parametrize(
    "reference",
    [
        *(None, "", "x = 1", "def f(", {}, {"cases": []}, {"runs": [{"stdin": ""}]}),
        {"cases": [{"args": []}], "function": "f"},
        {"cases": [{"expected": 1}]},
        {"tests": "def check(f): pass"},
    ],
)
def test_a_reference_that_checks_nothing_is_found_before_spending(reference: Any) -> None:
    with pytest.raises(ConfigError, match="t1"):
        code().check_task(task(reference))


@pytest.mark.real
@pytest.mark.parametrize("level", ["process", BWRAP])
@pytest.mark.parametrize("reference", [CASES, TESTS])
async def test_right_code_passes_and_half_right_code_earns_its_share(
    level: str, reference: Any
) -> None:
    assert await reward("def f(x): return x * x", reference, level) == 1.0
    share = await reward("def f(x): return 4", reference, level)
    assert 0.0 < share < 1.0
    assert (
        await reward("def f(x): return 4", reference, level, marking=Marking(partial=False)) == 0.0
    )


CHEATS = {
    "exit 0": "import sys; sys.exit(0)",
    "hard exit": "import os; os._exit(0)",
    "exit in call": "def f(x): raise SystemExit(0)",
    "hard exit in call": "def f(x):\n import os\n os._exit(0)",
    "printed score": "print('1.0'); print('PASSED'); print('{\"results\": []}')",
    "equal to all": "class E:\n def __eq__(s, o): return True\ndef f(x): return E()",
    "own int": "class E(int):\n def __eq__(s, o): return True\ndef f(x): return E(1)",
    "own builtins": "def abs(x): return 0\ndef all(x): return True\ndef f(x): return None",
    "own tests": "def test_a(): pass\ndef test_b(): pass\ndef check(f): pass",
    "patched builtins": "import builtins\nbuiltins.abs = lambda x: 0\ndef f(x): return None",
    "forged replies": 'import os\nfor fd in range(3, 30):\n try: os.write(fd, b\'{"value": 1,'
    ' "results": [["a", ""]]}\\n\' * 9)\n except OSError: pass\ndef f(x): return None',
    "raises": "def f(x): raise AssertionError",
    "closes its line": "import os\nos.closerange(0, 99)",
    "swapped runner": "import __main__\n__main__.encode = lambda v, d=0: {'results': []}\n"
    "def f(x): return 0",
}


@pytest.mark.real
@pytest.mark.parametrize("name", CHEATS)
async def test_no_trick_makes_a_pass(name: str) -> None:
    assert await reward(CHEATS[name], CASES) == 0.0
    assert await reward(CHEATS[name], TESTS) == 0.0


@pytest.mark.real
async def test_a_test_that_forgives_exceptions_does_not_forgive_an_exit() -> None:
    lenient = "try:\n    f(-1)\n    ok = False\nexcept Exception:\n    ok = True\nassert ok"
    assert await reward("def f(x): raise ValueError('neg')", lenient) == 1.0
    assert await reward("def f(x):\n import os\n os._exit(0)", lenient) == 0.0
    kind = "try:\n    f(-1)\n    ok = False\nexcept ValueError:\n    ok = True\nassert ok"
    assert await reward("def f(x): raise ValueError('neg')", kind) == 1.0
    assert await reward("def f(x): raise KeyError('neg')", kind) == 0.0


@pytest.mark.real
async def test_programs_are_judged_by_what_they_print() -> None:
    runs = {"runs": [{"stdin": "2 3\n", "stdout": "5"}, {"stdin": "1 1", "stdout": "2\n"}]}
    adds = "a, b = map(int, input().split())\nprint(a + b)\n"
    assert await reward(adds, runs) == 1.0
    assert await reward(adds + "raise SystemExit(0)", runs) == 1.0
    assert await reward(adds + "raise SystemExit(1)", runs) == 0.0
    assert await reward("print(5)", runs) == 0.5
    assert await reward("import os; os._exit(0)", runs) == 0.0


@pytest.mark.real
@pytest.mark.parametrize("level", ["process", BWRAP])
async def test_limits_hold_and_nothing_is_left_running(level: str, tmp_path: Path) -> None:
    mark = f"sleep-mark-{os.getpid()}-{level}"
    hangs = (
        f"import subprocess, sys, time\n"
        f"def f(x):\n"
        f"    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)', '{mark}'])\n"
        f"    time.sleep(60)\n"
    )
    assert await reward(hangs, CASES, level, timeout_s=1.0) == 0.0
    until = time.monotonic() + 30  # half of what a process that was left would live
    while [p for p in Path("/proc").glob("[0-9]*/cmdline") if mark.encode() in _read(p)]:
        assert time.monotonic() < until, "something was left running"
        time.sleep(0.05)
    assert await reward("def f(x): return [0] * 10**10", CASES, level) == 0.0
    assert await reward("def f(x):\n print('x' * 10**6)\n return x * x", CASES, level) == 1.0
    writes = "def f(x):\n with open('big', 'wb') as h: h.write(b'x' * 10**8)\n return x * x"
    assert await reward(writes, CASES, level) == 0.0


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.real
async def test_the_environment_is_empty_and_the_folder_is_fresh() -> None:
    looks = (
        "import os\ndef f(): return [sorted(set(os.environ) - {'LC_CTYPE', 'PWD'}), os.listdir()]"
    )
    reference = {"function": "f", "cases": [{"expected": [[], []]}]}
    assert await reward(looks, reference) == 1.0


@pytest.mark.real
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is absent")
async def test_bwrap_has_no_network_and_cannot_write_or_see_the_users_files(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s")
    tries = (
        f"import os, socket\n"
        f"def f():\n"
        f"    seen = [os.path.exists({str(secret)!r})]\n"
        f"    for act in (lambda: socket.create_connection(('1.1.1.1', 53), 1),\n"
        f"                lambda: open('/usr/x', 'w')):\n"
        f"        try: act(); seen.append(True)\n"
        f"        except OSError: seen.append(False)\n"
        f"    return seen\n"
    )
    reference = {"function": "f", "cases": [{"expected": [False, False, False]}]}
    assert await reward(tries, reference, "bwrap") == 1.0


@pytest.mark.real
async def test_cells_are_safe_at_once_and_leave_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    judge = code()
    answers = ["def f(x): return x * x", "def f(x): return 0"] * 4
    scores = await asyncio.gather(
        *(judge.score(said(f"```python\n{a}\n```"), task(CASES)) for a in answers)
    )
    assert [s.reward for s in scores] == [1.0, 0.0] * 4
    assert list(tmp_path.iterdir()) == []


BLOCKS = {
    "usage after": "```python\ndef f(x): return x * x\n```\nUse:\n```python\nprint(f(3))\n```",
    "output after": "```python\ndef f(x): return x * x\n```\nPrints:\n```\n9\n```",
    "shell before": "```bash\npip install x\n```\n```py\ndef f(x): return x * x\n```",
    "helper before": "```python\ndef g(x): return x * x\n```\n"
    "```python\ndef f(x): return g(x)\n```",
    "import before": "```python\nimport operator as o\n```\n"
    "```python\ndef f(x): return o.mul(x, x)\n```",
    "corrected": "```python\ndef f(x): return x\n```\nNo:\n```python\ndef f(x): return x * x\n```",
    "in a list": "1. So:\n\n   ```python\n   def f(x):\n       return x * x\n   ```",
    "left open": "```python\ndef f(x): return x * x\n",
    "tildes": "~~~python\ndef f(x): return x * x\n~~~\n~~~\nf(2)\n~~~",
    "assigned": "```python\nf = lambda x: x * x\n```\n```python\nassert f(2) == 4\n```",
    "ends itself": "```python\ndef f(x): return x * x\nprint(f(2))\nexit()\n```",
    "asks for input": "```python\ndef f(x): return x * x\nprint(f(int(input())))\n```",
}


@pytest.mark.real
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("reference", [CASES, TESTS], ids=["cases", "tests"])
async def test_the_block_that_defines_the_function_is_run(name: str, reference: Any) -> None:
    assert (await code().score(said(BLOCKS[name]), task(reference))).reward == 1.0


PROGRAMS = {
    "stdin.buffer": "import sys; a,b=map(int,sys.stdin.buffer.read().split()); print(a+b)",
    "stdin.read": "import sys; a,b=map(int,sys.stdin.read().split()); print(a+b)",
    "stdin lines": "import sys\nfor l in sys.stdin: print(sum(map(int,l.split())))",
    "open(0)": "a,b=map(int,open(0).read().split()); print(a+b)",
    "os.read": "import os; a,b=map(int,os.read(0,99).split()); print(a+b)",
    "fileinput": "import fileinput\nfor l in fileinput.input(): print(sum(map(int,l.split())))",
    "stdout.buffer": "import sys\ns=sum(map(int,input().split()))\n"
    "sys.stdout.buffer.write(str(s).encode())",
    "os.write": "import os; os.write(1, str(sum(map(int,input().split()))).encode())",
    "exit()": "print(sum(map(int,input().split()))); exit()",
    "quit()": "print(sum(map(int,input().split()))); quit(0)",
    "sys.exit(None)": "import sys; print(sum(map(int,input().split()))); sys.exit(None)",
    "os._exit": "import os; print(sum(map(int,input().split())), flush=True); os._exit(0)",
    "main guard": "def main(): print(sum(map(int,input().split())))\n"
    "if __name__=='__main__': main()",
    "thread": "import threading\nthreading.stack_size(1<<26)\n"
    "t=threading.Thread(target=lambda: print(sum(map(int,input().split()))))\nt.start(); t.join()",
    "atexit": "import atexit\natexit.register(lambda: print(s))\ns=sum(map(int,input().split()))",
    "dataclass": "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    "@dataclass\nclass P:\n a: int\n b: int\np=P(*map(int,input().split()))\nprint(p.a+p.b)",
    "no line end": "print(sum(map(int,input().split())), end='')",
    "crlf": "print(sum(map(int,input().split())), end='\\r\\n')",
}


@pytest.mark.real
@pytest.mark.parametrize("name", PROGRAMS)
async def test_a_right_program_is_right_however_it_reads_prints_and_ends(name: str) -> None:
    runs = {"runs": [{"stdin": "2 3", "stdout": "5"}]}
    assert await reward(PROGRAMS[name], runs) == 1.0


@pytest.mark.real
@pytest.mark.parametrize(
    "source",
    [
        "print(5)\nraise SystemExit(1)",
        "import os; print(5, flush=True); os._exit(3)",
        "print(5)\n1/0",
        "print('5\\x0b')",
        "print(5); print(6)",
        "import os, signal; print(5, flush=True); os.kill(os.getpid(), signal.SIGKILL)",
    ],
)
async def test_a_program_that_fails_or_prints_otherwise_is_wrong(source: str) -> None:
    assert await reward(source, {"runs": [{"stdin": "", "stdout": "5"}]}) == 0.0


@pytest.mark.real
async def test_only_a_line_feed_ends_a_line_of_output() -> None:
    for mark in ("\u2028", "\x0b", "\x0c", "\x85", "\r"):
        runs = {"runs": [{"stdin": "", "stdout": f"a{mark}b"}]}
        assert await reward(f"print({'a' + mark + 'b'!r})", runs) == 1.0
        assert await reward("print('a'); print('b')", runs) == 0.0


@pytest.mark.real
async def test_integers_of_any_length_cross_the_line() -> None:
    fact = "import math\ndef fact(n): return math.factorial(n)"
    tests = "import math\nassert fact(5) == 120\nassert fact(2000) == math.factorial(2000)"
    assert await reward(fact, tests) == 1.0
    long = 10**5000 + 7
    cases = {"function": "f", "cases": [{"args": [long], "expected": long + 1}]}
    assert await reward("def f(x): return x + 1", cases) == 1.0
    assert await reward("def f(x): return x", cases) == 0.0
    runs = {"runs": [{"stdin": "9" * 6000, "stdout": "1" + "0" * 6000}]}
    assert await reward("print(int(input()) + 1)", runs) == 1.0
    assert await reward("def f(x): return [x, {x: -x}]", {
        "function": "f", "cases": [{"args": [3], "expected": [3, {"3": -3}]}]
    }) == 0.0  # fmt: skip


INTRUSIONS = {
    "signals": "import os, signal\ndef f():\n try: os.kill(os.getppid(), 0)\n"
    " except OSError: return 'refused'",
    "memory": "import os\ndef f():\n try: open(f'/proc/{os.getppid()}/mem', 'rb')\n"
    " except OSError: return 'refused'",
    "environment": "import os\ndef f():\n try: open(f'/proc/{os.getppid()}/environ').read()\n"
    " except OSError: return 'refused'",
    "descriptors": "import os\ndef f():\n try: return os.listdir(f'/proc/{os.getppid()}/fd')\n"
    " except OSError: return 'refused'",
    "memfd": "import os\ndef f():\n try: os.memfd_create('x')\n except OSError: return 'refused'",
    "processes": "import os\ndef f():\n try: os.fork()\n except OSError: return 'refused'",
    "shared memory": "import os\ndef f():\n try: open('/dev/shm/x', 'w')\n"
    " except OSError: return 'refused'",
    "limits": "import os, resource\ndef f():\n"
    " try: resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))\n"
    " except OSError: return 'refused'",
}


@pytest.mark.real
@pytest.mark.parametrize("level", ["process", BWRAP])
@pytest.mark.parametrize("name", INTRUSIONS)
async def test_a_cell_reaches_no_other_process_and_no_memory_beside_its_limit(
    name: str, level: str
) -> None:
    reference = {"function": "f", "cases": [{"expected": "refused"}]}
    assert await reward(INTRUSIONS[name], reference, level) == 1.0


GROWTH = {
    "list": "def f(x): return [0] * 10**9",
    "bytes": "def f(x): return len(bytearray(2 << 30)) and x * x",
    "mmap": "import mmap\ndef f(x):\n m = mmap.mmap(-1, 2 << 30); m[0] = 1\n return x * x",
    "files": "def f(x):\n for i in range(40):\n"
    "  with open(str(i), 'wb') as h: h.write(bytes(8 << 20))\n"
    " import time; time.sleep(2)\n return x * x",
    "threads": "import threading\ndef f(x):\n threading.stack_size(1 << 29)\n"
    " t = threading.Thread(target=print); t.start(); t.join()\n return x * x",
}


@pytest.mark.real
@pytest.mark.parametrize("name", GROWTH)
async def test_memory_and_files_are_bounded_in_each_way_of_growing(name: str) -> None:
    assert await reward(GROWTH[name], CASES) == 0.0


@pytest.mark.real
@pytest.mark.parametrize(
    "leaves",
    [
        "import os\nfor _ in range(1500):\n os.mkdir('d'); os.chdir('d')",
        "import os\nos.mkdir('d'); open('d/x', 'w').close(); os.chmod('d', 0)",
        "import os\nos.mkdir('d'); os.symlink('/', 'd/root')",
    ],
)
async def test_whatever_a_cell_leaves_is_judged_and_removed(
    leaves: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert await reward(f"{leaves}\ndef f(x): return x * x", CASES) == 1.0
    assert await reward(f"{leaves}\ndef f(x): return 0", CASES) == 0.0
    assert list(tmp_path.iterdir()) == []


D = "def f(x):\n    return x * x\n"
FORMS = {
    "prose before": f"Here is the code:\n\n{D}",
    "prose around": f"The solution:\n\n{D}\nIt squares x.",
    "import and prose": f"Sure!\n\nimport math\n\n{D}\nHope that helps!",
    "indented": "Answer:\n\n    def f(x):\n        return x * x\n",
    "session": "```python\n>>> def f(x):\n...     return x * x\n...\n>>> f(2)\n4\n```",
    "session, no blank": "```\n>>> def f(x):\n...     return x * x\n>>> f(2)\n4\n```",
    "notebook": "```python\nIn [1]: def f(x):\n   ...:     return x * x\n```",
    "pycon": "```pycon\n>>> def f(x):\n...     return x * x\n```",
    "magics": f"```python\n%matplotlib inline\n!pip install x\n{D}```",
    "class": "```python\nclass Solution:\n    def f(self, x: List[int]) -> int:\n"
    "        return x * x\n```",
    "static": "```python\nclass Solution:\n    @staticmethod\n    def f(x):\n"
    "        return x * x\n```",
    "quoted": "> ```python\n> def f(x):\n>     return x * x\n> ```",
    "element": "<pre><code>def f(x):\n    return x * x\n</code></pre>",
    "marks": f"[PYTHON]\n{D}[/PYTHON]",
    "label": f"python\n{D}",
    "triple quotes": f"'''python\n{D}'''",
    "json": '{"code": "def f(x):\\n    return x * x\\n"}',
    "in a document": f"````markdown\n# Answer\n```python\n{D}```\nDone.\n````",
    "in a document with tildes": f"~~~md\n```py\n{D}```\n~~~",
    "left open, then prose": f"```python\n{D}\nThis squares.",
    "fence in a docstring": '```python\ndef f(x):\n    """\n    ```\n    f(2)\n    ```\n    """\n'
    "    return x * x\n```",
    "helper after": "```python\ndef f(x): return g(x)\n```\nwhere\n```python\n"
    "def g(x): return x * x\n```",
    "future twice": "```python\nfrom __future__ import annotations\ndef g(x): return x * x\n```\n"
    "```python\nfrom __future__ import annotations\ndef f(x): return g(x)\n```",
}


@pytest.mark.real
@pytest.mark.parametrize("name", FORMS)
async def test_code_in_any_form_of_answer_is_run(name: str) -> None:
    assert (await code().score(said(FORMS[name]), task(CASES_ONE))).reward == 1.0


CASES_ONE = {"function": "f", "cases": [{"args": [2], "expected": 4}]}


@pytest.mark.parametrize(
    "text", ["I cannot.", "The answer is 4 (see f).", "Use f(x) as said.", "x squared is x times x"]
)
def test_sentences_are_no_code(text: str) -> None:
    assert code_in(text, ["f"]) is None


lines = st.sampled_from(["It squares x.", "Here it is:", "Note that 2*2 is 4.", "", "Done!"])


@given(st.lists(lines, max_size=3), st.lists(lines, max_size=3))
def test_sentences_around_bare_code_change_nothing(before: list[str], after: list[str]) -> None:
    found = code_in("\n".join([*before, D, *after]), ["f"])
    assert found is not None and found.strip() == D.strip()


@pytest.mark.real
async def test_a_program_whose_call_stands_in_another_block_and_a_faked_input() -> None:
    runs = {"runs": [{"stdin": "2 3", "stdout": "5"}]}
    split = "```python\ndef solve():\n    print(sum(map(int, input().split())))\n```\n"
    fake = "```python\nimport io, sys\nsys.stdin = io.StringIO('1 1')\nprint(2)\n```"
    judge = code()
    whole = "```python\nprint(sum(map(int, input().split())))\n```\n"
    assert (await judge.score(said(f"{split}```python\nsolve()\n```"), task(runs))).reward == 1.0
    assert (await judge.score(said(f"{whole}Test:\n{fake}"), task(runs))).reward == 1.0
    file = "```python\nimport os\nos.path.dirname(__file__)\nprint(5)\n```"
    assert (await judge.score(said(file), task(runs))).reward == 1.0
