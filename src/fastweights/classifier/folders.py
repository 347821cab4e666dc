"""Folders of pictures: which pictures there are, what they are called, and what kind they are of."""

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from PIL import ImageOps

from fastweights.classifier.errors import InputError
from fastweights.data import ink
from fastweights.data.images import SUFFIXES, opened
from fastweights.data.own import eight_bit
from fastweights.data.sources import LARGEST_FILE
from fastweights.utils.errors import UserError
from fastweights.utils.reading import read_plain

LOOKED_AT = 60
"""Pictures looked at to tell drawings from photographs."""


def labelled_pictures(folder: Path) -> dict[str, list[Path]]:
    """The pictures of each class: a folder for each, or else single pictures named after their class."""
    if not folder.is_dir():
        what = "is no folder" if folder.exists() else "does not exist"
        raise InputError(f"{folder} {what}; name a folder with a folder of pictures for each class.")
    inside = sorted(one for one in folder.iterdir() if not one.name.startswith("."))
    folders, loose = [one for one in inside if one.is_dir()], [one for one in inside if is_picture(one)]
    if folders and loose:
        raise InputError(f"{loose[0]} lies beside folders of classes; move it into one of them.")
    groups = {one.name: pictures_under(one) for one in folders} if folders else {one.stem: [one] for one in loose}
    empty = next((name for name, pictures in groups.items() if not pictures), None)
    if empty is not None:
        raise InputError(f"{folder / empty} holds no pictures ({', '.join(SUFFIXES)}); add one, or remove the folder.")
    if len(groups) < 2:
        found = f"only one class, {next(iter(groups))}" if groups else "no pictures"
        raise InputError(f"{folder} holds {found}; make a folder of pictures for each of two classes or more.")
    if not folders and len(loose) != len(groups):
        twice = Counter(one.stem for one in loose).most_common(1)[0][0]
        raise InputError(f"{folder} holds two pictures called {twice}; make a folder for each class.")
    return groups


def pictures_in(paths: Iterable[Path]) -> list[Path]:
    """The pictures named, and those of the folders named, each once."""
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            inside = pictures_under(path)
            if not inside:
                raise InputError(f"{path} holds no pictures ({', '.join(SUFFIXES)}); name another folder.")
            found |= dict.fromkeys(inside)
        elif path.exists():
            found[path] = None
        else:
            raise InputError(f"{path} does not exist; name a picture or a folder.")
    return list(found)


def pictures_under(folder: Path) -> list[Path]:
    """All pictures of a folder and of the folders in it, sorted; hidden ones are not looked at."""
    paths = (one for one in folder.rglob("*") if is_picture(one))
    return sorted(one for one in paths if not any(part.startswith(".") for part in one.relative_to(folder).parts))


def is_picture(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and path.is_file()


def kind_of_pictures(pictures: Sequence[Path]) -> str:
    """The shipped model that fits: drawings for ink of one colour on plain paper, else photos."""
    looked_at = pictures[:: -(-len(pictures) // LOOKED_AT)]
    plain = seen = 0
    for picture in looked_at:
        try:
            look = _look(picture)
        except (UserError, OSError):  # it is refused or skipped, with a sentence, when it is read
            continue
        seen += 1
        plain += not look.is_photo and look.colourful < 0.35
    return "drawings" if 2 * plain >= seen else "photos"


def _look(picture: Path) -> ink.Look:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, about tags and sizes
        with opened(read_plain(picture, LARGEST_FILE), str(picture)) as image:
            image.draft("RGB", (2 * ink.LARGEST, 2 * ink.LARGEST))
            return ink.look(eight_bit(ImageOps.exif_transpose(image), str(picture)))
