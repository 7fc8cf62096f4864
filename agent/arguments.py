"""Find the specs, kernels and files that the command line names, and reject arguments that cannot work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path

import typer

from coda_agent.agent.terminal.safe_text import echo
from coda_agent.primitives.system.files import ROOT, regular

SPECS, KERNELS = Path("specs"), Path("generated_kernels")
NO_SOURCE = {  # suffixes of files that belong to a kernel, but are not its source
    ".raw.py": "edited CuTeDSL, which coda-agent optimize {name} verifies and coda-agent show shows",
    ".cutedsl.py": "the lowered text of a kernel",
    ".program.json": "the program of a kernel, which coda-agent show {path} shows",
    ".json": "not Python",
    ".yaml": "a spec",
}


def shipped(path: Path) -> Path:
    """If a file at this path exists only in the package, return its path in the package; otherwise return the
    path unchanged."""
    ours = ROOT / path
    return ours if ours.exists() and not path.exists() else path


def spec_file(given: Path) -> Path:
    """If ``given`` is only a spec's name, return that spec's file; otherwise return the path unchanged."""
    bare = given.name == str(given) and not given.suffix and not given.is_file()
    return shipped(SPECS / f"{given}.yaml") if bare else given


def spec_for(kernel: Path, given: Path | None) -> Path:
    """Find the spec of a kernel's file: the given spec, else NAME.yaml in the kernel's folder, else NAME.yaml
    in specs/.

    For an accepted kernel, specs/ is searched first, because the kernel was accepted for the spec in specs/.
    Raises BadParameter if no spec is found.
    """
    if given:
        return spec_file(given)
    name = kernel.name.partition(".")[0]
    beside, ours = kernel.parent / f"{name}.yaml", shipped(SPECS / f"{name}.yaml")
    accepted = kernel.parent.resolve() in (KERNELS.resolve(), ROOT / KERNELS)
    found = [path for path in ((ours, beside) if accepted else (beside, ours)) if path.is_file()]
    if not found:
        near = get_close_matches(name, [path.stem for path in shipped(SPECS).glob("*.yaml")], n=1)
        remedy = f", such as --spec {near[0]}" if near else ""
        raise typer.BadParameter(
            f"{kernel}: no spec: neither {beside} nor {ours} exists; give --spec{remedy}"
        )
    if len(found) > 1 and not found[0].samefile(found[1]):
        echo(f"coda-agent: using the spec {found[0]}, not {found[1]}; choose with --spec", err=True)
    return found[0]


def name_in(folder: Path, given: str) -> str:
    """Return NAME if ``given`` is NAME or folder/NAME.yaml. Raises BadParameter for a path outside
    ``folder``."""
    path = Path(given)
    if given == path.name and path.suffix != ".yaml":
        return given
    if path.resolve().parent != folder.resolve():
        raise typer.BadParameter(f"{given}: not in {folder}; give a name from there")
    return path.stem


def accepted_file(kernel: Path, suffix: str) -> Path:
    """If the path is only an accepted kernel's name, return that kernel's file with this suffix; otherwise
    return the path unchanged."""
    known = shipped(KERNELS / f"{kernel}.{suffix}")
    return known if not kernel.suffix and not kernel.exists() and known.exists() else kernel


def refuse_unused(why: str, *names: str, **options: object) -> None:
    """Raise BadParameter for options without effect. ``why`` is the reason and the remedy. ``names`` lists
    options as the user typed them. ``options`` maps names to values; a false value means "not given"."""
    given = [*names, *(f"--{name.replace('_', '-')}" for name, value in options.items() if value)]
    if given:
        raise typer.BadParameter(f"{' and '.join(given)} would do nothing: {why}")


@contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """Wrap a block that reads or writes a file named on the command line. If the block fails, raise
    BadParameter with that file's name, because the original error may name a temporary file."""
    try:
        yield
    except FileNotFoundError:
        raise typer.BadParameter(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{path}: cannot be read as text: {error}") from None
    except OSError as error:
        raise typer.BadParameter(f"{path}: {error.strerror}; give another file") from None


@contextmanager
def asking() -> Iterator[None]:
    """Wrap a block that asks a person a question. Raises KeyboardInterrupt if the person presses Ctrl-C, and
    EOFError if the input ends. Without this wrapper, typer raises Abort in either case."""
    try:
        yield
    except typer.Abort as ended:
        interrupted = isinstance(ended.__context__, KeyboardInterrupt)
        raise (KeyboardInterrupt if interrupted else EOFError) from None


def source(path: Path) -> str:
    """The text of a file that the command line names."""
    with naming_file(path):
        return regular(path).read_text(encoding="utf-8")


def kernel_source(kernel: Path) -> str:
    """Return a kernel's source. An interrupted acceptance of the kernel is completed first."""
    from coda_agent.agent.storage.kernel_files import consistent_files

    name, edited = kernel.name.partition(".")[0], ".raw." in kernel.name
    with suppress(FileNotFoundError), consistent_files(name, kernel.parent, edited=edited):
        return _kernel(kernel)
    return _kernel(kernel)


def _kernel(path: Path) -> str:
    return source(existing_kernel(path))


def existing_kernel(path: Path) -> Path:
    """Return the path of an existing kernel file. If the file is missing, raise BadParameter with a
    suggestion."""
    if not path.exists():
        raise typer.BadParameter(f"{path}: no such kernel file; {_instead(path.name)}")
    return path


def _instead(name: str) -> str:
    """Suggest what the user may have meant by the name of a missing kernel."""
    from coda_agent.agent.run import runs

    if name in runs.names():
        return f"it is a run: coda-agent review {name}, or report {name}"
    name, kernels = name.partition(".")[0], shipped(KERNELS).glob("*.program.json")
    near = get_close_matches(name, [path.name.partition(".")[0] for path in kernels], n=1)
    return f"did you mean {near[0]}?" if near else "give a file or an accepted kernel's name"


def refuse_no_source(kernel: Path, command: str, *also: str) -> None:
    """Raise BadParameter if a file's suffix shows that it is not a kernel's source. The message says which
    file to give instead. ``also``: other suffixes that the command accepts."""
    name = kernel.name.partition(".")[0]
    for ending, what in NO_SOURCE.items():
        if kernel.name.endswith(ending) and ending not in also:
            words = what.format(name=name, path=kernel)
            raise typer.BadParameter(
                f"{kernel}: this is {words}; {command} takes a kernel's source{_beside(kernel, name)}"
            )


def _beside(kernel: Path, name: str) -> str:
    """The kernel's source in the same folder, or the accepted kernel of this name, as the end of a message;
    "" if there is neither."""
    source = kernel.with_name(f"{name}.py")
    if source.exists():
        return f": {source}"
    return f": {name}" if shipped(KERNELS / source.name).exists() else ""
