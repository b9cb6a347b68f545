"""One custom part of each kind, each with an argument: the code of docs/extending.md and docs/add_*.md.

    PYTHONPATH=examples python -m skyrl_train.main --config-dir examples/plugins/conf +experiment=plugins

trains two steps with all of them at once.
"""
