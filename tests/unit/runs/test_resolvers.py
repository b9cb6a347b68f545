from pathlib import Path

import pytest

from skyrl_train.config.data import is_own_data
from skyrl_train.errors import ConfigError
from skyrl_train.runs.cli.conf_folder import conf_dir


def test_this_checkout_has_its_configuration() -> None:
    assert conf_dir().name == "conf"
    assert conf_dir().is_dir()


def test_in_a_checkout_it_lies_beside_the_package(tmp_path: Path) -> None:
    (tmp_path / "skyrl_train").mkdir()
    (tmp_path / "conf").mkdir()

    assert conf_dir(tmp_path / "skyrl_train") == tmp_path / "conf"


def test_an_installed_one_wins_over_a_foreign_folder_of_that_name(tmp_path: Path) -> None:
    (tmp_path / "skyrl_train" / "conf").mkdir(parents=True)
    (tmp_path / "conf").mkdir()

    assert conf_dir(tmp_path / "skyrl_train") == tmp_path / "skyrl_train" / "conf"


def test_a_missing_one_is_an_error_that_says_where_it_was_sought(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Install skyrl_train again") as error:
        conf_dir(tmp_path / "skyrl_train")

    assert str(tmp_path / "conf") in str(error.value)


def test_a_file_in_the_folder_of_gsm8k_is_data_of_ones_own_unless_it_is_one_of_its_two() -> None:
    assert [is_own_data(f"data/gsm8k/{name}.parquet") for name in ("train", "validation", "mine")] == [
        False,
        False,
        True,
    ]
