"""The kernel's calls that a sandbox refuses, as a program for seccomp."""

from __future__ import annotations

import os
import struct

_NUMBERS = {  # of system calls: x86-64, aarch64
    "ptrace": (101, 117),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "unshare": (272, 97),
    "setns": (308, 268),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "open_by_handle_at": (304, 265),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "mount_setattr": (442, 442),
}
_NUMBERS_WITHOUT_NAMESPACES = {  # -1: there is none
    "socket": (41, 198),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "setsid": (112, 157),
    "setpgid": (109, 154),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_send_signal": (424, 424),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "kcmp": (312, 272),
    "prlimit64": (302, 261),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    # What Landlock does not look at: modes, owners, times and attributes of files; sizes before its third version.
    "chmod": (90, -1),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, -1),
    "lchown": (94, -1),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "utime": (132, -1),
    "utimes": (235, -1),
    "futimesat": (261, -1),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "setxattrat": (463, 463),
    "removexattrat": (466, 466),
    "truncate": (76, 45),
}
_MACHINES = {"x86_64": (0, 0xC000003E, 56), "aarch64": (1, 0xC00000B7, 220)}
"""Column of the table, the kernel's word for it, and the number of `clone`."""
_NEW_NAMESPACES = 0x7E020000
_ENOSYS, _EPERM, _ALLOW = 0x00050026, 0x00050001, 0x7FFF0000


def call_filter(*, namespaces: bool) -> bytes:
    """Return the program by which the kernel refuses calls that attack it most often, and without `namespaces` those that
    reach other processes or a network. Raises KeyError for a machine whose numbers are not known."""
    column, architecture, clone = _MACHINES[os.uname().machine]
    denied = [each[column] for each in _NUMBERS.values()]
    denied += [] if namespaces else [each[column] for each in _NUMBERS_WITHOUT_NAMESPACES.values() if each[column] >= 0]
    load, equal, at_least, has_bits, answer = 0x20, 0x15, 0x35, 0x45, 0x06  # code, jump if so, jump if not, operand
    lines = [(load, 0, 0, 4), (equal, 1, 0, architecture), (answer, 0, 0, _EPERM), (load, 0, 0, 0)]
    lines += [(at_least, 0, 1, 0x40000000), (answer, 0, 0, _EPERM)]  # x32
    lines += [
        (equal, 0, 1, 435),
        (answer, 0, 0, _ENOSYS),
    ]  # clone3, whose flags cannot be seen: libraries then take clone
    for number in denied:
        lines += [(equal, 0, 1, number), (answer, 0, 0, _EPERM)]
    lines += [(equal, 0, 3, clone), (load, 0, 0, 16), (has_bits, 0, 1, _NEW_NAMESPACES), (answer, 0, 0, _EPERM)]
    return b"".join(struct.pack("=HBBI", *line) for line in [*lines, (answer, 0, 0, _ALLOW)])
