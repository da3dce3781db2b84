"""tools/pack_card.py: what is packed for a machine without a network, how it is cut and checked; nothing is downloaded."""

import random
import struct
import subprocess
import zipfile
from pathlib import Path

import card_contents
import card_fatbin
import card_pieces
import card_wheels
import pack_card
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

PTX, MACHINE = 1, 2


# ---- what the machine lacks


def an_index(**releases: dict[str, list[str]]):
    """A package index: by name, requirements by version; the newest that serves is found."""

    def find(name, specifier):
        serves = [v for v in releases[name.replace("-", "_")] if v in specifier]
        if not serves:
            raise card_wheels.CannotPack(f"{name}{specifier}")
        newest = max(serves, key=Version)
        needs = tuple(Requirement(text) for text in releases[name.replace("-", "_")][newest])
        return card_wheels.Wheel(name, Version(newest), Path(f"{name}.whl"), needs)

    return find


def versions(found):
    return {name: str(wheel.version) for name, wheel in found.items()}


def lacking(find, *roots, have="", **more):
    return versions(card_wheels.lacking(card_wheels.parsed(roots), find, card_wheels.names_in(have), **more))


def test_markers_are_judged_for_the_target_and_not_for_the_python_that_packs():
    find = an_index(
        a={"1": ['b; python_version == "3.12"', 'c; python_version != "3.12"', 'd; platform_machine == "aarch64"']},
        b={"1": []},
    )
    assert lacking(find, "a") == {"a": "1", "b": "1"}


def test_an_extra_brings_its_needs_also_when_it_is_asked_for_later():
    find = an_index(a={"1": ["b"]}, b={"1": ['c; extra == "more"']}, c={"1": []}, d={"1": ["b[more]"]})
    assert lacking(find, "a") == {"a": "1", "b": "1"}
    assert lacking(find, "a", "d") == {"a": "1", "b": "1", "c": "1", "d": "1"}


def test_what_the_machine_has_stays_there_unless_its_version_does_not_serve():
    find = an_index(a={"1": ["B_b>=2", "c>=2"]}, b_b={"2": []}, c={"2": []})
    assert lacking(find, "a", have="b.b==1 c==2.1") == {"a": "1", "b-b": "2"}
    assert lacking(find, "a", have="b-b, c") == {"a": "1"}


def test_a_version_is_one_that_all_who_ask_can_take():
    find = an_index(a={"1": ["c"]}, b={"1": ["d"]}, c={"1": [], "2": ["e"]}, d={"1": ["c<2"]}, e={"1": []})
    assert lacking(find, "a", "b") == {"a": "1", "b": "1", "c": "1", "d": "1"}


def test_what_is_never_packed_is_not_looked_for():
    find = an_index(a={"1": ["torch==2.11.0"]})
    assert lacking(find, "a", never={"torch"}) == {"a": "1"}


def test_versions_that_do_not_meet_are_an_error():
    with pytest.raises(card_wheels.CannotPack, match="c"):
        lacking(an_index(a={"1": ["c<2", "b"]}, b={"1": ["c>=2"]}, c={"1": [], "2": []}), "a")


def test_a_wheel_that_is_there_is_not_downloaded_again(tmp_path, monkeypatch):
    for name in ("a-1.0", "a-2.0", "a-3.0b1", "b-1.0b1"):
        with zipfile.ZipFile(tmp_path / f"{name}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}.dist-info/METADATA", f"Name: {name[0]}\nRequires-Dist: c>=1\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a process was started"))
    shelf = card_wheels.Shelf(tmp_path)
    assert shelf.find("a", SpecifierSet()).version == Version("2.0")
    assert shelf.find("a", SpecifierSet("<2")).requires == (Requirement("c>=1"),)
    assert shelf.find("b", SpecifierSet()).version == Version("1.0b1")  # it has nothing else


def test_a_word_that_is_no_distribution_is_named():
    with pytest.raises(card_wheels.CannotPack, match=r"torch=2.*NAME==VERSION"):
        card_wheels.names_in("numpy\ntorch=2  # comment")


def test_an_archive_has_the_projects_own_requirements_and_the_trainers():
    roots = card_contents.roots(["trl"], "0.26.0")
    assert roots["vllm"][0] == "vllm==0.26.0" and any(line.startswith("pluggy") for line in roots["vllm"])
    assert "trl==1.16.0" in roots["trl"] and any(line.startswith("wrapt") for line in roots["trl"])


class AnIndex:
    """In the place of the shelf: two trainers that share a need, and one with a need of vLLM's."""

    def __init__(self, *_):
        self.find = an_index(
            vllm={"0.26.0": ["torch==2.11.0", "q"]},
            trl={"1": ["shared", "q"]},
            verl={"1": ["shared"]},
            shared={"1": []},
            q={"1": []},
        )


@pytest.fixture
def small_index(monkeypatch):
    asked = {"vllm": ["vllm==0.26.0"], "trl": ["trl"], "verl": ["verl"]}
    monkeypatch.setattr(pack_card, "Shelf", AnIndex)
    monkeypatch.setattr(card_contents, "roots", lambda *_: asked)


def test_a_trainers_archive_counts_on_vllms_and_on_no_other_trainers(small_index, tmp_path):
    archives = pack_card.needed(pack_card.options([str(tmp_path), "--trainer", "trl", "--trainer", "verl"]))
    assert {name: sorted(wheels) for name, wheels in archives.items()} == {
        "vllm": ["q", "vllm"],
        "trl": ["shared", "trl"],
        "verl": ["shared", "verl"],
    }


def test_a_torch_that_is_not_vllms_is_refused(small_index, tmp_path, capsys):
    has = tmp_path / "has.txt"
    has.write_text("torch==2.12.0")
    assert pack_card.main([str(tmp_path / "out"), "--have", str(has)]) == 1
    assert "was built with torch==2.11.0, and the machine has 2.12.0: give another --vllm" in capsys.readouterr().err


# ---- GPU code for other cards


def fat_binary(*entries: tuple[int, int, bytes]) -> bytes:
    body = b"".join(
        struct.pack("<HHIQIIHHI", kind, 1, 64, len(code), 0, 0, 0, 0, arch).ljust(64, b"\1") + code
        for kind, arch, code in entries
    )
    return struct.pack("<IHHQ", card_fatbin.MAGIC, 1, 16, len(body)) + body


def shared_object(section: bytes) -> bytes:
    """An ELF file with the section and its names, and nothing else."""
    names = b"\0.nv_fatbin\0.shstrtab\0"
    table = 64 + len(section) + len(names)
    head = bytearray(64)
    head[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<Q", head, 0x28, table)
    struct.pack_into("<HHH", head, 0x3A, 64, 3, 2)
    rows = [(0, 0, 0), (1, 64, len(section)), (12, 64 + len(section), len(names))]
    table_bytes = b"".join(struct.pack("<IIQQQQ", name, 1, 0, 0, at, size).ljust(64, b"\0") for name, at, size in rows)
    return bytes(head) + section + names + table_bytes


def test_machine_code_of_the_card_stays_and_all_other_becomes_zeros():
    codes = [
        (MACHINE, 80, b"80808080"),
        (MACHINE, 90, b"90909090"),
        (MACHINE, 100, b"AAAAAAAA"),
        (PTX, 90, b"pppppppp"),
    ]
    whole = shared_object(fat_binary(*codes) + bytes(8) + fat_binary((MACHINE, 75, b"75757575")))
    out, zeroed = card_fatbin.without_other_cards(whole, 90)
    assert zeroed == 32 and len(out) == len(whole)
    assert b"90909090" in out and not any(code in out for code in (b"80808080", b"AAAAAAAA", b"pppppppp", b"75757575"))
    different = [i for i, (a, b) in enumerate(zip(whole, out, strict=True)) if a != b]
    assert len(different) == zeroed  # headers are as they were


def test_intermediate_code_stays_where_there_is_no_machine_code_for_the_card():
    whole = shared_object(fat_binary((MACHINE, 80, b"80808080"), (PTX, 80, b"pppppppp"), (PTX, 100, b"qqqqqqqq")))
    out, _ = card_fatbin.without_other_cards(whole, 90)
    assert b"pppppppp" in out and b"80808080" not in out and b"qqqqqqqq" not in out


def test_a_format_that_is_not_known_is_not_guessed_at():
    with pytest.raises(card_fatbin.UnknownFormat):
        card_fatbin.without_other_cards(shared_object(b"something else, 24 bytes"), 90)
    with pytest.raises(card_fatbin.UnknownFormat):
        card_fatbin.without_other_cards(shared_object(fat_binary((7, 90, b"12345678"))), 90)
    with pytest.raises(card_fatbin.UnknownFormat):
        card_fatbin.without_other_cards(b"text", 90)


def test_a_library_without_gpu_code_stays_as_it_is():
    whole = shared_object(b"")
    assert card_fatbin.without_other_cards(whole, 90) == (whole, 0)


# ---- pieces


@pytest.fixture
def packed(tmp_path):
    site, out = tmp_path / "site", tmp_path / "out"
    (site / "p").mkdir(parents=True)
    out.mkdir()
    (site / "p" / "noise").write_bytes(random.Random(0).randbytes(60000))
    (site / "p" / "module.py").write_text("x = 1\n")
    archive = card_pieces.pack(site, "vllm", {"p": "1"}, out, 5000)
    card_pieces.write_manifest(out, [archive], {"python": "3.12"})
    return site, out, archive


def test_pieces_are_no_larger_than_asked_and_make_the_same_files_again(packed, tmp_path):
    site, out, archive = packed
    assert len(archive.pieces) > 1
    assert all((out / piece.name).stat().st_size == piece.bytes <= 5000 for piece in archive.pieces)
    assert card_pieces.read_manifest(out) == [archive]
    card_pieces.verify(out, [archive])
    card_pieces.unpack(out, tmp_path / "there")
    for file in ("noise", "module.py"):
        assert (tmp_path / "there" / "p" / file).read_bytes() == (site / "p" / file).read_bytes()


@pytest.mark.parametrize("fault", ["broken", "missing"])
def test_a_piece_that_is_broken_or_missing_is_named_and_nothing_is_unpacked(packed, tmp_path, fault):
    _, out, archive = packed
    path = out / archive.pieces[1].name
    if fault == "missing":
        path.unlink()
    else:
        data = bytearray(path.read_bytes())
        data[100] ^= 1
        path.write_bytes(data)
    with pytest.raises(card_pieces.Broken, match=f"{path.name} is {fault}"):
        card_pieces.verify(out, [archive])
    with pytest.raises(card_pieces.Broken, match=path.name):
        card_pieces.unpack(out, tmp_path / "there")
    assert not list((tmp_path / "there").rglob("*.py"))


def test_pieces_of_an_earlier_call_do_not_stay(packed):
    site, out, archive = packed
    again = card_pieces.pack(site, "vllm", {"p": "1"}, out, 2**20)
    assert len(again.pieces) == 1 and [p.name for p in out.glob("*.piece")] == [again.pieces[0].name]
    assert sum(piece.bytes for piece in archive.pieces) == again.pieces[0].bytes


def test_the_script_names_the_archives_that_there_are(packed, tmp_path):
    _, out, _ = packed
    done = subprocess.run(["sh", out / "unpack.sh", tmp_path / "x", "verl"], text=True, capture_output=True)
    assert done.returncode == 2 and "there are: vllm" in done.stderr


def test_a_folder_without_a_manifest_is_an_error_that_says_what_to_do(tmp_path, capsys):
    assert pack_card.main([str(tmp_path), "--check", "--python", "python3.12"]) == 1
    assert "manifest.json: name the folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--vllm", "new"], "give a release, such as 0.26.0"),
        (["--have", "nowhere"], "pip list --format=freeze"),
        (["--piece", "0"], "above 0"),
        (["--check"], "needs --python"),
    ],
)
def test_bad_input_is_refused_with_what_to_do(tmp_path, capsys, arguments, said):
    with pytest.raises(SystemExit):
        pack_card.main([str(tmp_path), *arguments])
    assert said in capsys.readouterr().err


# ---- what is left out


def test_files_are_left_out_unless_they_are_kept(tmp_path):
    names = ["vllm/vllm-rs", "vllm/third_party/deep_gemm/include/x.h", "vllm/model.py", "x/libx.a"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("12345")
    assert card_contents.trim(tmp_path, ["*.a"], None) == (10, 0)
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == ["libx.a", "model.py"]
