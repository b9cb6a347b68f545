"""Files and JSON that other programs may have written, and that survive a power cut."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.system.files.append_log import AppendLog, DamagedLine, log_lines
    from skyrl_train.system.files.files import (
        DISK_TIMEOUT_S,
        FileSums,
        bring_to_disk,
        cache_folder,
        finite_number,
        keep_private,
        parse_strict_json,
        read_json,
        sync_folder,
        sync_tree,
        whole_number,
        write_atomically,
        write_hashed,
        write_json,
    )
    from skyrl_train.system.files.text import (
        is_text,
        json_line,
        json_problem,
        json_text,
        parse_json,
        shown,
        writable_text,
    )

__all__ = [
    "DISK_TIMEOUT_S",
    "AppendLog",
    "DamagedLine",
    "FileSums",
    "bring_to_disk",
    "cache_folder",
    "finite_number",
    "is_text",
    "json_line",
    "json_problem",
    "json_text",
    "keep_private",
    "log_lines",
    "parse_json",
    "parse_strict_json",
    "read_json",
    "shown",
    "sync_folder",
    "sync_tree",
    "whole_number",
    "writable_text",
    "write_atomically",
    "write_hashed",
    "write_json",
]

__getattr__ = lazily(__name__)
