"""The context that a library makes at each place of use: practice, evaluation, deployment.

With every repair on there is one answer for all three. The switches of defects 19 and 20 restore
the published behaviour: practice in the user message, deployment in the system message, the word
None for an empty library. Does not know rendering (`tfgrpo.context` does).
"""

from __future__ import annotations

from typing import Literal

from tfgrpo.context import Context, ContextPart
from tfgrpo.experience.library import Library, Selector
from tfgrpo.experience.settings import ExperienceSettings
from tfgrpo.rollout import Task

Use = Literal["practice", "evaluation", "deployment"]


def prompt_context(
    library: Library,
    settings: ExperienceSettings,
    *,
    use: Use = "practice",
    step: int = 1,
    task: Task | None = None,
    selector: Selector | None = None,
) -> Context:
    """Return what a policy is given.

    Args:
        library: may be empty.
        settings: placement, template and the switches of defects 19 and 20.
        use: where the prompt is used.
        step: 1 for the first step of a run; the preview variant injects nothing in it.
        task: for a choice per task, and so that no task sees an exemplar of itself.
        selector: None injects the whole library.
    """
    placement = settings.deployed_placement if use == "deployment" else settings.placement
    context = library.context(task, selector, placement=placement, template=settings.template)
    if not context.is_empty or settings.repairs.empty_is_bare:
        return context
    if settings.flow == "paper-preview" and step <= 1:
        return context
    return Context((ContextPart("lesson", text="None"),), placement, settings.template)
