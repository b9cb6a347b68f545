"""Files and JSON that other programs may have written, and that survive a power cut."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.system.files.append_log import (
        AppendLog as AppendLog,
        DamagedLine as DamagedLine,
        log_lines as log_lines,
    )
    from skyrl_train.system.files.files import (
        DISK_TIMEOUT_S as DISK_TIMEOUT_S,
        FileSums as FileSums,
        bring_to_disk as bring_to_disk,
        cache_folder as cache_folder,
        finite_number as finite_number,
        keep_private as keep_private,
        make_folder as make_folder,
        parse_strict_json as parse_strict_json,
        read_json as read_json,
        sync_folder as sync_folder,
        sync_tree as sync_tree,
        whole_number as whole_number,
        write_atomically as write_atomically,
        write_hashed as write_hashed,
        write_json as write_json,
    )
    from skyrl_train.system.files.text import (
        is_text as is_text,
        json_line as json_line,
        json_problem as json_problem,
        json_text as json_text,
        parse_json as parse_json,
        shown as shown,
        writable_text as writable_text,
    )

__getattr__ = lazily(__name__)
