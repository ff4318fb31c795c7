"""The names of this machine's Unix sockets, and whose they are.

Any user can give a socket any name, so names are bytes. Linux 5.3 and newer say in answer to a netlink request who made
a socket (``ss -xe`` asks the same). A container, systemd's RestrictAddressFamilies or a kernel without unix_diag may
forbid such requests. /proc/net/unix has the names alone, and a name in it may contain line breaks.
"""

from __future__ import annotations

import re
import socket
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

LIST = Path("/proc/net/unix")
MOST_BYTES = 16 << 20
"""A user who makes that many sockets hides further names."""
PATIENCE_S = 1.0

# linux/netlink.h, linux/sock_diag.h and linux/unix_diag.h. The numbers are in the byte order of the machine.
NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20
DUMP = 0x1 | 0x300
ERROR, DONE = 2, 3
SHOW_NAME, SHOW_UID = 0x1, 0x40
NAME, UID = 0, 7
HEADER = struct.Struct("=IHHII")
REQUEST = struct.Struct("=BBHIIIII")
ANSWER_BYTES = 16
ATTRIBUTE = struct.Struct("=HH")
LINE = re.compile(rb"[0-9a-fA-F]+:(?: [0-9A-F]+){5} +[0-9]+ (.*)", re.DOTALL)


def names() -> list[tuple[bytes, int | None]]:
    """Each name, and the user id of the socket's owner; None where Linux does not tell. Abstract names begin with 0.

    Nothing that other users name their sockets raises an error.
    """
    try:
        return list(_asked())
    except OSError:
        return [(name, None) for name in _listed()]


def _asked() -> Iterator[tuple[bytes, int]]:
    """Raises ``OSError`` if this Linux, or a container, does not answer, or not with owners."""
    deadline = time.monotonic() + PATIENCE_S
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(PATIENCE_S)
        show, any_state = SHOW_NAME | SHOW_UID, 0xFFFFFFFF
        request = REQUEST.pack(socket.AF_UNIX, 0, 0, any_state, 0, show, 0xFFFFFFFF, 0xFFFFFFFF)
        kernel.sendto(HEADER.pack(HEADER.size + len(request), SOCK_DIAG_BY_FAMILY, DUMP, 1, 0) + request, (0, 0))
        while time.monotonic() < deadline:
            for kind, body in _parts(kernel.recv(1 << 18), HEADER):
                if kind == DONE:
                    return
                if kind == ERROR:
                    raise OSError("this Linux lists no sockets by netlink")
                found = dict(_parts(body[ANSWER_BYTES:], ATTRIBUTE))
                if NAME in found and UID not in found:
                    raise OSError("this Linux does not tell whose a socket is")
                if NAME in found:
                    yield found[NAME], int.from_bytes(found[UID], sys.byteorder)


def _parts(data: bytes, head: struct.Struct) -> Iterator[tuple[int, bytes]]:
    """Type and content of each netlink message or attribute.

    Each begins with its length and its type, and the next one follows at a multiple of 4 bytes.
    """
    while len(data) >= head.size:
        fields = head.unpack_from(data)
        length = max(fields[0], head.size)
        yield fields[1], data[head.size : length]
        data = data[(length + 3) & ~3 :]


def _listed() -> Iterator[bytes]:
    try:
        with LIST.open("rb") as file:
            lines = file.read(MOST_BYTES).split(b"\n")
    except OSError:
        return
    for line in lines:
        if found := LINE.fullmatch(line):
            # Linux writes each 0 as @, and no name on disk that we look for begins with one.
            yield re.sub(rb"\A@", b"\0", found[1])
