"""`python -m skyrl_train.selftest`: whether this machine computes what the trainer promises, in minutes.

    machine    which devices, versions and drivers there are (`machine.py`)
    cases      what is tried, in order of risk (`cases.py`; their bodies are in the other files)
    processes  each case in processes of its own, under a deadline (`processes.py`)
    report     a table, and a JSON file to attach to a report (`__main__.py`)

A case computes with the package's own code and compares with a result that does not depend on the device. A case that
crashes, aborts or hangs ends its own processes and nothing else.
"""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.selftest.cases import Context as Context, SkipCase as SkipCase
    from skyrl_train.selftest.machine import Machine as Machine
    from skyrl_train.selftest.processes import run_body as run_body

__getattr__ = lazily(__name__)
