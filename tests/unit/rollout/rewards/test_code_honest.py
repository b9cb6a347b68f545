# ruff: noqa: E501 - programs stand in a line
"""Honest programs and rows of assert statements as data sets have them: scored as they are in one interpreter."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import pytest

from skyrl_train.rollout.rewards.ready_made import Verdict, run_tests
from skyrl_train.system.sandbox import sandbox

ADD = "def add(a, b): return a + b"
STACK = (
    "class Stack:\n  def __init__(self, items=()): self.items = list(items)\n  def push(self, x):\n"
    "    self.items.append(x)\n    return self\n  def pop(self): return self.items.pop()\n"
    "  def __len__(self): return len(self.items)\n  def __eq__(self, other): return self.items == other.items"
)
NODE = (
    "class Node:\n  def __init__(self, value): self.value, self.left, self.right = value, None, None\n"
    "def height(root): return 0 if root is None else 1 + max(height(root.left), height(root.right))"
)
ROWS: dict[str, tuple[str, list[str]]] = {
    "numbers": (ADD, ["assert add(1, 2) == 3", "assert add(2, 2) == 5", "assert add(0.1, 0.2) != 0.3"]),
    "texts": (ADD, ["assert add('ä', '\\ud800') == 'ä\\ud800'", "assert add('a', 'b').upper() == 'AB'"]),
    "bytes": (ADD, ["assert add(b'a', b'b') == b'ab'", "assert isinstance(add(bytearray(b'a'), b'b'), bytearray)"]),
    "lists": ("def twice(x): return x + x", ["assert twice([1, [2]]) == [1, [2], 1, [2]]", "assert twice(()) == ()"]),
    "tuples are no lists": ("def f(x): return tuple(x)", ["assert f([1]) == (1,)", "assert f([1]) == [1]"]),
    "sets": ("def f(x): return set(x)", ["assert f([1, 1]) == {1}", "assert set(f('ab')) == set('ba')"]),
    "frozen sets as keys": ("def f(x): return {frozenset(x): 1}", ["assert f('ab') == {frozenset('ba'): 1}"]),
    "mappings": ("def f(x): return {(1, x): {'a': None}}", ["assert f(2)[1, 2]['a'] is None", "assert len(f(3)) == 1"]),
    "keys in order": ("def f(x): return dict.fromkeys(x)", ["assert list(f('cab')) == ['c', 'a', 'b']"]),
    "large numbers": (
        "import math\ndef f(n): return math.factorial(n)",
        ["assert f(2000) == __import__('math').factorial(2000)", "assert f(25) // f(24) == 25"],
    ),
    "not a number": ("def f(): return float('nan')", ["assert f() != f()", "assert f() == f()"]),
    "infinity": ("def f(): return -float('inf')", ["assert f() < -1e308"]),
    "complex": ("def f(x): return x * 1j", ["assert f(2) == 2j"]),
    "booleans": ("def f(x): return x > 1", ["assert f(2) is True", "assert not f(0)", "assert type(f(1)) is bool"]),
    "nothing": ("def f(x): pass", ["assert f(2) is None"]),
    "ranges": ("def f(n): return range(n)", ["assert list(f(3)) == [0, 1, 2]", "assert f(3) == range(3)"]),
    "generators": (
        "def f(n):\n  for i in range(n): yield i * i",
        ["assert list(f(3)) == [0, 1, 4]", "assert next(f(1)) == 0"],
    ),
    "maps and zips": ("def f(x): return zip(x, map(str, x))", ["assert dict(f([1, 2])) == {1: '1', 2: '2'}"]),
    "Counter": (
        "from collections import Counter\ndef f(x): return Counter(x)",
        ["assert f('aab') == {'a': 2, 'b': 1}", "assert f('aab') == Counter({'a': 2, 'b': 1})"],
    ),
    "defaultdict": (
        "from collections import defaultdict\ndef f(x):\n  d = defaultdict(list)\n  d[x].append(1)\n  return d",
        ["assert f('a') == {'a': [1]}"],
    ),
    "deque": ("from collections import deque\ndef f(x): return deque(x)", ["assert list(f([1, 2])) == [1, 2]"]),
    "Decimal": ("from decimal import Decimal\ndef f(x): return Decimal(x)", ["assert f('0.1') * 3 == Decimal('0.3')"]),
    "Fraction": (
        "from fractions import Fraction\ndef f(a, b): return Fraction(a, b)",
        ["assert f(2, 4) == Fraction(1, 2)"],
    ),
    "dates": (
        "import datetime\ndef f(d): return d + datetime.timedelta(days=1)",
        ["assert f(datetime.date(2024, 2, 28)) == datetime.date(2024, 2, 29)"],
    ),
    "named tuples": (
        "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(): return P(1, 2)",
        ["assert f() == (1, 2)"],
    ),
    "a module of the program": ("import math\ndef f(x): return x / 3", ["assert math.isclose(f(1), 1 / 3)"]),
    "a module of the test": (ADD, ["import math\nassert math.floor(add(1, 0.5)) == 1"]),
    "a module that nobody imported": (ADD, ["assert math.floor(add(1, 0.5)) == 1"]),
    "a name of a module": ("from math import isclose\ndef f(x): return x / 3", ["assert isclose(f(1), 1 / 3)"]),
    "keyword arguments": (
        "def f(a, *, b=2): return a - b",
        ["assert f(5) == 3", "assert f(a=5, b=1) == 4", "assert f(1, 2)"],
    ),
    "arguments changed in place": (
        "def f(x): x.sort(); x.append(9)",
        ["x = [3, 1]\nf(x)\nassert x == [1, 3, 9]", "y = [1]\nassert f(y) is None and len(y) == 2"],
    ),
    "a matrix changed in place": (
        "def f(m): m[0][1] = 7",
        ["m = [[1, 2], [3, 4]]\nf(m)\nassert m == [[1, 7], [3, 4]]"],
    ),
    "errors": (
        "def f(x):\n  if x < 0: raise ValueError('negative', x)\n  return 1 // x",
        [
            "try:\n  f(-1)\n  assert False\nexcept ValueError as e:\n  assert e.args == ('negative', -1)",
            "try:\n  f(0)\n  assert False\nexcept ZeroDivisionError: pass",
            "try:\n  f(1)\n  assert False, 'no error'\nexcept ValueError: pass",
        ],
    ),
    "errors of its own": (
        "class Bad(KeyError): pass\ndef f(): raise Bad('x')",
        ["try:\n  f()\nexcept KeyError as e:\n  assert e.args == ('x',)\nelse:\n  assert False"],
    ),
    "functions as arguments": (
        "def f(g, x): return [g(each) for each in x]",
        ["assert f(lambda x: x + 1, [1, 2]) == [2, 3]", "assert f(str, [1]) == ['1']"],
    ),
    "functions as answers": ("def adder(n): return lambda x: x + n", ["assert adder(2)(3) == 5"]),
    "its own functions as arguments": (
        "def twice(f): return lambda x: f(f(x))\ndef inc(x): return x + 1",
        ["assert twice(inc)(1) == 3"],
    ),
    "values of the program": (
        "ANSWER = {'a': [1]}\ncount = 0\ndef up():\n  global count\n  count += 1",
        ["assert ANSWER['a'] == [1]", "up()\nassert count == 1\nup()\nassert count == 2"],
    ),
    "a check that the row defines": (
        ADD,
        ["def check(candidate):\n  assert candidate(1, 2) == 3\n  assert candidate(2, 2) == 4", "check(add)"],
    ),
    "what earlier tests defined": (ADD, ["total = add(1, 2)", "assert total == 3", "total += 1\nassert total == 4"]),
    "loops": (ADD, ["for a, b in [(1, 2), (3, 4)]:\n  assert add(a, b) == a + b"]),
    "a name of the row over the program's": (ADD + "\nx = 1", ["x = 5\nassert x == 5", "assert x == 5"]),
    "a builtin's name under test": ("def sum(a, b): return a * b", ["assert sum(3, 4) == 12", "assert sum(2, 3) == 7"]),
    "methods of an object": (
        STACK,
        ["assert Stack().push(1).push(2).pop() == 2", "s = Stack([4])\nassert s.items == [4]"],
    ),
    "a Solution": (
        "class Solution:\n  def twoSum(self, n, t): return [0, 1]",
        ["assert Solution().twoSum([2, 7], 9) == [0, 1]"],
    ),
    "trees": (NODE, ["root = Node(1)\nroot.left = Node(2)\nroot.left.left = Node(3)\nassert height(root) == 3"]),
    "what is printed": (
        "def hello(): print('hello')",
        [
            "import io, contextlib\nout = io.StringIO()\nwith contextlib.redirect_stdout(out): hello()\nassert out.getvalue() == 'hello\\n'"
        ],
    ),
    "recursion": ("def f(n): return 1 if n < 2 else n * f(n - 1)", ["assert f(100) % 101 == 100"]),
    "a recursion without end": ("def f(n): return f(n)", ["assert f(1)", "assert True"]),
    "files in its folder": (
        "def f(x):\n  open('a', 'w').write(x)\n  return open('a').read()",
        ["assert f('é') == 'é'"],
    ),
    "a test that is no Python": (ADD, ["assert add(1, 2 == 3", "assert add(1, 2) == 3"]),
    "a module of its own": ("if __name__ == '__main__':\n  def f(): return 1", ["assert f() == 1"]),
    "processes": (
        "import subprocess\ndef f(): return subprocess.run(['echo', 'x'], capture_output=True, text=True).stdout",
        ["assert f() == 'x\\n'"],
    ),
    "threads": (
        "from concurrent.futures import ThreadPoolExecutor\ndef f():\n  with ThreadPoolExecutor(4) as p: return list(p.map(str, range(4)))",
        ["assert f() == ['0', '1', '2', '3']"],
    ),
    "dataclasses": (
        "from dataclasses import dataclass\n@dataclass\nclass P:\n  x: int\ndef f(p): return p.x",
        ["assert f(P(3)) == 3"],
    ),
}
QUICK = {"numbers", "methods of an object"}


def in_one_interpreter(code: str, tests: list[str]) -> int:
    """How many pass as the program's own interpreter has it: what was scored before there was a sandbox."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, "answer", "exec"), names)
    passed = 0
    for test in tests:
        with contextlib.suppress(Exception):
            exec(compile(test, "test", "exec"), names)
            passed += 1
    return passed


def verdict(code: str, tests: list[str]) -> Verdict:
    if (why := sandbox.violations("required", "a test")) and not os.environ.get("CI"):
        pytest.skip(str(why[0]))
    return run_tests(code, tests, timeout_s=20.0, memory_mb=512, sandbox="required")


@pytest.mark.parametrize(
    ("code", "tests"),
    [pytest.param(*row, id=name, marks=() if name in QUICK else pytest.mark.slow) for name, row in ROWS.items()],
)
def test_honest_rows_are_scored_as_in_one_interpreter(
    code: str, tests: list[str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert verdict(code, tests) == Verdict(passed=in_one_interpreter(code, tests))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("test", "needs"),
    [
        ("assert Stack([1]) == Stack([1])", "__eq__ of the program's class Stack"),
        ("assert len(Stack([1])) == 1", "__len__ of the program's class Stack"),
        ("try:\n  assert Stack([1]) != 3\nexcept BaseException: pass", "__ne__ of the program's class Stack"),
    ],
)
def test_a_test_that_would_take_the_programs_word_does_not_pass_and_says_why(test: str, needs: str) -> None:
    found = verdict(STACK, [test, "assert Stack([1]).pop() == 1"])
    assert found.passed == 1
    assert found.undecided[0].startswith(f"it needs {needs}")
