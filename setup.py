"""Only what pyproject.toml cannot say: `conf/` lies beside the package and is installed inside it."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["skyrl_train", "skyrl_train.*"]), "skyrl_train.conf"],
    package_dir={"skyrl_train.conf": "conf"},
)
