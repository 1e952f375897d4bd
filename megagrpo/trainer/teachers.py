"""The teachers of a run: checked before servers start, and loaded beside the policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from megagrpo.config import RunConfig, TeacherSection
from megagrpo.data.tokens.tokenizer import Tokenizer, load_tokenizer
from megagrpo.engine.served_teacher import ServedTeacher
from megagrpo.families.hf_config import HfConfig, load_hf_config, model_problems
from megagrpo.families.weight_sources import resolve_model
from megagrpo.platform.parallel.agree import run_own_and_agree
from megagrpo.platform.parallel.layout import Layout
from megagrpo.platform.process.progress_hook import Progress
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.policy.reference import Reference
from megagrpo.policy.teacher import Teacher, build_teachers
from megagrpo.weights.bridge.load import load_hf


@dataclass(frozen=True)
class TeacherFiles:
    """The Hugging Face folder of a teacher, its shape with the policy's vocabulary, and the `rows` of its files."""

    folder: Path
    hf_config: HfConfig
    rows: int


def teacher_files(
    sections: Sequence[TeacherSection], policy: HfConfig, layout: Layout, tokenizer: Tokenizer | None, longest: int = 0
) -> list[TeacherFiles | None]:
    """Return the files of the teachers, None for the policy, the reference and those behind servers, which rank 0 asks
    whether they read the `longest` sequence. Raises ValueError with the key of one
    whose tokens are not the policy's, which ranks with a `tokenizer` check, or which the layout does not divide."""
    for number, section in enumerate(sections):
        if section.urls and tokenizer is not None and layout.world_rank == 0:
            ServedTeacher(section, f"algorithm.teacher.{number}", layout).check(tokenizer, longest)
    return [
        None
        if section.is_own or section.urls
        else model_files(f"algorithm.teacher.{number}.path", str(section.path), policy, layout, tokenizer)
        for number, section in enumerate(sections)
    ]


def model_files(
    key: str, path: str, policy: HfConfig, layout: Layout, tokenizer: Tokenizer | None, scores: bool = False
) -> TeacherFiles:
    """Return the files of a model that reads the policy's tokens, and may have more rows of padding; with `scores` it
    may be a reward model. Raises ValueError like `teacher_files`."""
    folder = resolve_model(path, key, scores)
    hf_config = load_hf_config(folder, scores)
    fix = f"name a {'critic' if scores else 'teacher'} with the policy's tokens"
    rows, num_tokens = hf_config.vocab_size, policy.vocab_size
    named = tokenizer is not None and (folder / "tokenizer_config.json").exists()
    pieces = load_tokenizer(folder).pieces() if named else []
    if rows < num_tokens or (rows > num_tokens and tokenizer and not 0 < len(pieces) <= num_tokens):
        raise ValueError(f"{key}: {folder} has {rows} tokens, the policy {num_tokens}; {fix}")
    for i, (own, other) in enumerate(zip(tokenizer.pieces() if tokenizer else [], pieces, strict=False)):
        if own != other:
            raise ValueError(f"{key}: token {i} of {folder} is {other!r}, the policy's is {own!r}; {fix}")
    for problem in model_problems(hf_config, layout.parallel):
        raise ValueError(f"{key}: {folder} in the policy's layout: {problem.text}")
    return TeacherFiles(folder, replace(hf_config, vocab_size=num_tokens), rows)


def load_teachers(
    config: RunConfig,
    files: Sequence[TeacherFiles | None],
    models: tuple[MegatronPolicy, Reference | None],
    progress: Progress,
) -> list[Teacher]:
    """Build the teachers beside these models, policy and reference, and load their weights. Collective."""
    teachers, layout = [], models[0].layout
    shapes = [None if one is None else one.hf_config for one in files]
    served = {
        name: ServedTeacher(section, f"algorithm.teacher.{number}", layout)
        for number, (name, section) in enumerate(config.algorithm.teachers.items())
        if section.urls
    }
    for teacher, one in zip(build_teachers(config, *models, shapes, served), files, strict=True):
        if one is not None and isinstance(teacher.model, MegatronPolicy):
            load = partial(load_hf, teacher.model.chunks, one.hf_config, one.folder, layout, progress, rows=one.rows)
            run_own_and_agree(layout, load)
        teachers.append(teacher)
    return teachers
