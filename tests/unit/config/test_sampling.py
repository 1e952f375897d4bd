"""Conflicting keys of sampling and evaluation are refused."""

import pytest

from megagrpo.config import ConfigError, load_config
from tests.unit.for_each import for_each

SMALLEST = "model: {path: m}\ndata: {train: {source: a.jsonl}}\nrewards: {functions: [{function: exact_number}]}\n"
REFUSED = {
    "rollout.logit_bias.3=1 train.fused_logprobs=true": "train.fused_logprobs: true writes no logits, which "
    "rollout.logit_bias, rollout.allowed_token_ids, rollout.repetition_penalty, rollout.structured_outputs change; "
    "set it to false",
    "rollout.allowed_token_ids=[3,3]": "rollout.allowed_token_ids: must name each token once (got [3, 3])",
    "rollout.bad_words=[no]": "rollout.bad_words: no longer a key; ban single tokens with rollout.logit_bias, or punish "
    "words in a reward function",
    "rollout.frequency_penalty=0.1": "rollout.frequency_penalty: no longer a key; use rollout.repetition_penalty, or the "
    "rewards repetition or token_repetition",
    "rollout.structured_outputs.regex=a rollout.max_staleness=1 rollout.in_flight=resume rollout.placement=dedicated "
    "algorithm.importance_correction=token_truncate "
    "algorithm.importance_correction_max=2": "rollout.structured_outputs: starts again with each request, "
    "but an interrupted response is requested again with its tokens as the prompt (rollout.in_flight resume); choose "
    "keep, or leave it out",
    "rollout.logit_bias.the=101": "rollout.logit_bias.the: must be at most 100 (got 101)",
    "rollout.logit_bias.3=-101": "rollout.logit_bias.3: must be at least -100 (got -101)",
    "rollout.repetition_penalty=0": "rollout.repetition_penalty: must be greater than 0 (got 0)",
    "rollout.structured_outputs.regex=a rollout.structured_outputs.choice=[a]": "rollout.structured_outputs: must name "
    "one constraint, but has regex, choice (got {'regex': 'a', 'choice': ['a']})",
    "rollout.structured_outputs.choice=[]": "rollout.structured_outputs: choice must be a list of texts that are not "
    "empty (got {'choice': []})",
    "rollout.structured_outputs.json=text": "rollout.structured_outputs: json must be a JSON schema as a mapping (got "
    "{'json': 'text'})",
    "rollout.structured_outputs.grammar=a": "rollout.structured_outputs: grammar must be in EBNF, with rules such as "
    "`root ::= ...` (got {'grammar': 'a'})",
    "rollout.structured_outputs.regex=a rollout.extra_args=[--reasoning-parser,qwen3]": "rollout.structured_outputs: "
    "vLLM would begin after a thought, and the trainer cannot know where; leave --reasoning-parser out",
    "data.sampling_column=sampling train.fused_logprobs=true": "data.sampling_column: gives tokens their own "
    "temperature, but the kernels of train.fused_logprobs have one for all; set fused_logprobs to false",
    "data.curriculum=[0.95,0.9]": "data.curriculum: [0.95, 0.9] is an empty interval; swap the two",
    "data.curriculum=pass_rate": "data.curriculum: must be the lowest and the highest pass rate, such as [0.1, 0.9], or "
    "[] for no curriculum (got 'pass_rate')",
    "data.curriculum_low=0.2": "data.curriculum_low: no longer a key; write data.curriculum: [0.1, 0.9], the lowest and "
    "the highest pass rate",
    "evaluation.min_p=0.1": "evaluation.min_p: no longer a key; use evaluation.top_p or evaluation.top_k",
    "evaluation.sets.hard.source=a evaluation.sets.hard.min_p=0.1": "evaluation.sets.hard.min_p: no longer a key; use the set's top_p or "
    "top_k",
    "multi_turn.completion_length_limit_scope=per_round": "multi_turn.completion_length_limit_scope: no longer a key; "
    "leave it out: with multi_turn.max_response_length, rollout.max_completion_length limits each turn",
    "run.otel.endpoint=http://a": "run.otel: no longer a key; name the tracker's file in run.trackers (docs/trackers.md)",
    "run.mlflow.experiment=a": "run.mlflow: no longer a key; name the tracker's file in run.trackers (docs/trackers.md)",
    "data.source_args.share=1": "data.source_args: has no effect without data.source; name a class, or leave it out",
    "data.source=mine": "data.source: `mine` is no class; write path/file.py:Class or package.module:Class",
    "data.source=a.b:C data.curriculum=[0,0.9]": "data.curriculum: [0.0, 0.9] chooses prompts, and data.source "
    "chooses them already; leave one of them out",
    "data.source=a.b:C data.shuffle=false": "data.shuffle: false has no effect: data.source decides the order; leave "
    "it out",
    "data.source=a.b:C run.num_train_epochs=1": "run.num_train_epochs: data.source decides how often a row is drawn, "
    "so an epoch has no length; set run.max_steps instead",
    "data.curriculum=[0,2]": "data.curriculum.1: must be at most 1 (got 2)",
    "algorithm.max_resample_times=0": "algorithm.max_resample_times: must be greater than 0 (got 0)",
    "rollout.stop=['']": "rollout.stop.0: must not be empty, because an empty text ends every response (got '')",
    "rollout.include_stop_str_in_output=false": "rollout.include_stop_str_in_output: false has no effect without "
    "rollout.stop; name texts that end a response, or leave it out",
    "rollout.thinking_end=</think>": "rollout.thinking_end: has no effect without rollout.max_thinking_tokens; set it, "
    "or leave it out",
    "rollout.max_thinking_tokens=0": "rollout.max_thinking_tokens: must be greater than 0 (got 0)",
    "rollout.max_thinking_tokens=256": "rollout.max_thinking_tokens: 256 is not below rollout.max_completion_length "
    "256; lower it",
    "rollout.max_thinking_tokens=9 rollout.structured_outputs.regex=a": "rollout.structured_outputs: starts again with each "
    "request, and a thought's end begins one (rollout.max_thinking_tokens); leave one of the two out",
    "data.chat_template_kwargs.tokenize=true": "data.chat_template_kwargs.tokenize: `tokenize` is an argument of the "
    "renderer, not a variable of the template; leave it out",
    "data.chat_template=none "
    "data.chat_template_kwargs.thinking=true": "data.chat_template_kwargs: has no effect, because "
    "data.chat_template is none; leave one of them out",
    "evaluation.steps=2": "evaluation.steps: 2 needs held-out prompts; set data.eval or evaluation.sets, or set steps "
    "to 0",
    "evaluation.keep_best=reward": "evaluation.keep_best: reward needs held-out prompts; set data.eval or "
    "evaluation.sets, or leave keep_best empty",
    "evaluation.num_generations=2": "evaluation.num_generations: 2 greedy responses (temperature 0) are identical; "
    "raise evaluation.temperature, or use 1",
    "rollout.routing_replay=engine rollout.pp=2": "rollout.routing_replay: engine needs the routes of all layers, and "
    "vLLM does not return them with rollout.pp 2; set pp to 1 and raise tp, or choose trainer",
    "rollout.routing_replay=engine "
    "rollout.extra_args=[--no-enable-prefix-caching]": "rollout.routing_replay: engine: vLLM keeps routes with the "
    "blocks of its prefix cache, and rollout.extra_args disables it; leave --no-enable-prefix-caching out",
    "rollout.routing_replay=trainer": "rollout.routing_replay: trainer replays the routes of the old log-probs, but a "
    "step has one optimizer step, which computes them itself; raise one of the others, or choose engine or off",
    "train.freeze_moe_router=true lora.rank=4": "train.freeze_moe_router: true has no effect: adapters leave routers "
    "frozen; set it to false",
    "algorithm.moe_router_bias_update_rate=0.1 lora.rank=4": "algorithm.moe_router_bias_update_rate: 0.1 changes "
    "routers, but lora.rank freezes them; set it to 0, or the rate to 0",
    "algorithm.moe_router_bias_update_rate=0.1 "
    "train.freeze_moe_router=true": "algorithm.moe_router_bias_update_rate: 0.1 changes routers, but "
    "train.freeze_moe_router freezes them; set it to false, or the rate to 0",
    "evaluation.sets.hard.source=b "
    "evaluation.sets.hard.num_generations=4": "evaluation.sets.hard.num_generations: 4 greedy responses "
    "(temperature 0) are identical; raise the set's temperature, or use 1",
    "evaluation.sets.hard.source=b "
    "evaluation.sets.hard.temprature=1": "evaluation.sets.hard.temprature: unknown key; did you mean "
    "evaluation.sets.hard.temperature?",
    "evaluation.sets.hard.size=1": "evaluation.sets.hard.source: required, but missing; set it",
}


@for_each("override", REFUSED)
def test_what_contradicts_itself_is_refused(override, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(SMALLEST)
    with pytest.raises(ConfigError) as caught:
        load_config(path, override.split())
    assert str(caught.value).split("\n  ")[1:] == [REFUSED[override]]
