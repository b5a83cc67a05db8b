"""Which devices a *_VISIBLE_DEVICES variable leaves visible."""

from __future__ import annotations

from collections.abc import Sequence


def visible(uuids: Sequence[str], value: str | None) -> Sequence[int]:
    """Positions of the visible devices, read as CUDA and HIP read the variable.

    Entries are numbers or the beginning of a UUID, in either case. The first entry that names no device ends the list,
    so that "-1" or an empty text hides all; an entry that stands twice hides all too. A slice of a device (MIG-...)
    cannot be told from its UUID: then all count as visible.
    """
    if value is None:
        return range(len(uuids))
    shown: list[int] = []
    for entry in (part.strip() for part in value.split(",")):
        if entry.startswith("MIG-"):
            return range(len(uuids))
        matches = [i for i, uuid in enumerate(uuids) if entry and uuid.lower().startswith(entry.lower())]
        if entry.isdecimal() and int(entry) < len(uuids):
            matches = [int(entry)]
        if len(matches) != 1:
            break
        if matches[0] in shown:
            return []
        shown += matches
    return shown
