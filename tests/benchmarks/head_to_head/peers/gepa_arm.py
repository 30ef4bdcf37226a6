"""GEPA 0.1.4: evolves the system prompt, its default adapter and reflection prompt."""

from __future__ import annotations

import os
from typing import Any

from common import Job, finish


def main() -> None:
    job = Job.read()
    os.environ |= {"OPENAI_API_BASE": job.api_base, "OPENAI_API_KEY": "x"}
    import gepa
    from gepa.adapters.default_adapter.default_adapter import DefaultAdapter, EvaluationResult

    def evaluate(data: Any, response: str) -> EvaluationResult:
        reward, feedback = job.grade(data["additional_context"]["task_id"], response)
        return EvaluationResult(score=reward, feedback=feedback)

    def rows(tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            {
                "input": t["prompt"],
                "answer": t["reference"],
                "additional_context": {"task_id": t["task_id"]},
            }
            for t in tasks
        ]

    name = f"openai/{job.model}"
    adapter = DefaultAdapter(
        model=name,
        evaluator=evaluate,
        max_litellm_workers=24,
        litellm_batch_completion_kwargs={
            "temperature": job.temperature,
            "max_tokens": job.max_tokens,
        },
    )
    result = gepa.optimize(
        seed_candidate={"system_prompt": job.system},
        trainset=rows(job.train),
        valset=rows(job.choose),
        adapter=adapter,
        reflection_lm=f"openai/{job.writer}",
        reflection_lm_kwargs={"max_tokens": job.critic_tokens, "temperature": 1.0},
        reflection_minibatch_size=job.minibatch,
        max_metric_calls=job.metric_calls,
        stop_callbacks=lambda state: job.is_over(),
        seed=job.seed,
        raise_on_exception=False,
    )
    tried = len(result.candidates)
    finish(result.best_candidate["system_prompt"], note=f"{tried} prompts scored")


if __name__ == "__main__":
    main()
