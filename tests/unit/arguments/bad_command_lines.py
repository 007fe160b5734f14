"""Command lines with one mistake each: the quickstart's flags, changed as users change them by mistake.

Each case is what replaces or follows the quickstart's flags, and the texts that the refusal must contain. The error
must also contain an advice, see ADVICE. bad_files.py has the files, which are written next to the quickstart's dataset.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

ADVICE = (
    "use ", "add --", "set only one", "give ", "did you mean", "known are", "leave ", "correct these rows", "remove ",
    "rename ",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    kind: str
    flags: tuple[str, ...]
    contains: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.kind}: {' '.join(self.flags)}"


def _cases(kind: str, table: str) -> list[Case]:
    """Read a table: flags, ' -> ', and the texts that the error contains, separated by ' & '."""
    cases = []
    for line in filter(None, map(str.strip, table.splitlines())):
        flags, _, texts = line.partition(" -> ")
        typed = tuple(part.replace("~", " ") for part in flags.split(" "))
        contains = tuple(texts.split(" & ")) if texts else (typed[0].removeprefix("--"),)
        cases.append(Case(kind, typed, contains))
    return cases


def _each(kind: str, values: str, flags: str) -> list[Case]:
    """Give each of these flags each of these values."""
    return [
        Case(kind, (f"--{flag}", *([] if value == "NONE" else [value])), (f"--{flag}",))
        for flag in flags.split()
        for value in values.split()
    ]


_MISSPELT = """
max_completion_lenght max_completion_length|max_completions_length max_completion_length|modle model|modell model
datasets dataset|data_set dataset|reward_fucns reward_funcs|rewards_funcs reward_funcs|reward_function reward_funcs
num_generation num_generations|numgenerations num_generations|globel_batch_size global_batch_size
micro_batchsize micro_batch_size|tensor_parallel_size tensor_model_parallel_size
pipeline_parallel_size pipeline_model_parallel_size|expert_parallel_size expert_model_parallel_size
context_paralel_size context_parallel_size|sequence_paralel sequence_parallel|temprature temperature|top_kk top_k
vllm_gpu_memory_utilisation vllm_gpu_memory_utilization|vllm_max_model_length vllm_max_model_len|vllm_mdoe vllm_mode
vllm_tensor_paralel_size vllm_tensor_parallel_size|sleep_levels sleep_level|offload_modell offload_model
lora_ranks lora_rank|lora_aplha lora_alpha|tunner_type tuner_type|ouput_dir output_dir|outptu_dir output_dir
save_stpes save_steps|loging_steps logging_steps|evals_steps eval_steps|train_itres train_iters
epsilon_hihg epsilon_high|los_type loss_type|advantage_estimater advantage_estimator
importance_sampling_levels importance_sampling_level
recompute_granularty recompute_granularity|max_lenght max_length|use_vlm use_vllm|val_datasets val_dataset
dynamic_samples dynamic_sample|kl_in_rewards kl_in_reward|overlong_filters overlong_filter|truncation_stratergy
""".replace("truncation_stratergy\n", "truncation_stratergy truncation_strategy")

_OTHER_NAMES = """
learning_rate lr|per_device_train_batch_size micro_batch_size|gradient_accumulation_steps global_batch_size
max_steps train_iters|warmup_ratio lr_warmup_fraction|warmup_steps lr_warmup_iters|lr_scheduler_type lr_decay_style
max_grad_norm clip_grad|adam_epsilon adam_eps|gradient_checkpointing recompute_granularity
save_only_model no_save_optim|resume_from_checkpoint mcore_model|vllm_server_url vllm_server_base_url|kl_coef beta
deepspeed use_distributed_optimizer|tp tensor_model_parallel_size|pp pipeline_model_parallel_size
cp context_parallel_size|ep expert_model_parallel_size|num_epochs num_train_epochs|lora_r lora_rank|dtype torch_dtype
per_device_eval_batch_size num_generations_eval|eval_strategy eval_steps|max_prompt_length max_length
"""


def _renamed(kind: str, table: str) -> list[Case]:
    pairs = [pair.split() for pair in table.strip().replace("\n", "|").split("|")]
    return [Case(kind, (f"--{wrong}", "1"), (f"--{wrong}", f"--{right}")) for wrong, right in pairs]


_INTEGERS = """
num_generations global_batch_size micro_batch_size max_completion_length max_length train_iters save_steps
logging_steps tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size
expert_model_parallel_size vllm_tensor_parallel_size vllm_max_model_len lora_rank top_k seed num_iterations
steps_per_generation max_tokens_per_micro_batch
"""
_NUMBERS = """
lr min_lr temperature top_p beta epsilon epsilon_high weight_decay clip_grad vllm_gpu_memory_utilization
repetition_penalty lora_dropout entropy_coef num_train_epochs adam_beta2 fipo_clip_range
"""
_SWITCHES = """
sequence_parallel offload_model offload_optimizer dynamic_sample overlong_filter vllm_enforce_eager log_completions
no_save_optim check_model padding_free
"""
_CHOICES = """
--loss_type grpoo -> loss_type & grpo
--loss_type gspo -> loss_type & importance_sampling_level
--advantage_estimator ppo -> advantage_estimator & grpo
--scale_rewards std -> scale_rewards & group
--importance_sampling_level word -> importance_sampling_level & token
--kl_estimator k4 -> kl_estimator & k3
--rollout_importance_sampling_mode tis -> rollout_importance_sampling_mode & token_truncate
--vllm_mode remote -> vllm_mode & colocate
--tuner_type qlora -> tuner_type & lora
--torch_dtype int8 -> torch_dtype & bfloat16
--torch_dtype bf16 -> torch_dtype & use --torch_dtype bfloat16
--torch_dtype fp16 -> torch_dtype & use --torch_dtype bfloat16
--torch_dtype fp32 -> torch_dtype & use --torch_dtype float32 with --fp16 false
--torch_dtype auto -> torch_dtype & bfloat16
--recompute_granularity all -> recompute_granularity & full
--lr_decay_style linearly -> lr_decay_style & linear
--truncation_strategy middle -> truncation_strategy & left
--bad_reward ignore -> bad_reward & drop
--sync_check none -> sync_check & off
--rollout_quantization int8 -> rollout_quantization & fp8
--share_prompts yes -> share_prompts & auto
--router_replay_mode R1 -> router_replay_mode & R3
--optimizer adamw -> optimizer & adam
--save_strategy step -> save_strategy & steps
--report_to tensorbord -> report_to & tensorboard
--sleep_level 3 -> sleep_level & 1
--rlhf_type grpo2 -> rlhf_type & grpo
--attention_backend fast -> attention_backend & flash
--attention_backend unfused --context_parallel_size 2 --tensor_model_parallel_size 1 -> attention_backend & flash
--attention_backend unfused --share_prompts true -> attention_backend & share_prompts & auto
--unread_tensors ignore -> unread_tensors & warn
--ddp_backend mpi -> ddp_backend & nccl
--moe_token_dispatcher_type ring -> moe_token_dispatcher_type & alltoall
--completion_length_limit_scope all -> completion_length_limit_scope & total
--model_type qwen33 -> model_type & qwen3
--template chattml -> template & chatml
--agent_template hermess -> agent_template & hermes
--recompute_modules nothing --recompute_granularity selective -> recompute_modules & core_attn
"""
_RANGES = """
--num_generations 0
--num_generations -4
--num_generations 1
--num_generations_eval 0
--global_batch_size 0
--global_batch_size -32
--global_batch_size 1000000000000
--micro_batch_size 0
--micro_batch_size -1
--generation_batch_size 0
--generation_batch_size -8
--steps_per_generation 0
--max_completion_length 0
--max_completion_length -1
--num_iterations 0
--max_tokens_per_micro_batch 0
--infer_batch_size 0
--infer_max_tokens_per_micro_batch -1
--tensor_model_parallel_size 0
--tensor_model_parallel_size -2
--pipeline_model_parallel_size 0
--context_parallel_size 0
--vllm_tensor_parallel_size 0
--vllm_max_model_len 1
--beta -0.1
--beta nan
--epsilon -0.2
--epsilon_high -1
--epsilon inf
--delta 0.5
--dual_clip 1
--kl_horizon 0
--entropy_coef nan
--top_entropy_quantile 0
--top_entropy_quantile 1.5
--tau_pos 0
--real_tau -1
--fipo_decay_rate 0
--rollout_importance_sampling_threshold -2
--off_policy_sequence_mask_delta nan
--off_policy_sequence_mask_delta -1
--fipo_clip_range -1
--fipo_safety_threshold 0
--virtual_pipeline_model_parallel_size 0
--max_length 100000000
--max_completion_length 100000000
--vllm_max_model_len 100000000
--lr 1e30
--lr -1e-3 -> --lr -1e-3 must be above 0
--eval_correct_from -1e-3 -> use --eval_correct_from=-1e-3
--reward_weights nan
--reward_weights inf
--reward_weights 0
--phase_timeout -1
--reward_timeout 0
--stop_grace -5
--router_agreement_samples -1
--max_staleness -1
--rollout_logprobs_interval -1
--max_turns 0
--val_dataset DATA --eval_temperature -1 -> eval_temperature
--eval_correct_from nan
--eval_temperature 0.5
"""
_RANGE_FLAGS = """
temperature:0,-1,nan,1e-9 top_p:0,1.5,-1 top_k:-2 repetition_penalty:0,-1 max_length:0,1,-1 lr:0,-1,nan,inf
min_lr:-1,nan lr_warmup_iters:-1 lr_warmup_fraction:1,-0.1,2 lr_decay_iters:0 weight_decay:-1,inf clip_grad:-1,nan
adam_beta1:1,1.5,-0.1 adam_beta2:1 adam_eps:0 freeze_parameters_ratio:1.5,-1 lora_rank:0,-8 lora_alpha:0
lora_dropout:1,-0.5 train_iters:0,-1 logging_steps:0,-1 save_steps:0,-5 save_total_limit:0 eval_steps:0
eval_iters:-2 seed:-1,99999999999 data_seed:-1 split_dataset_ratio:1,-0.1,2 dataset_num_proc:0
vllm_gpu_memory_utilization:0,1.5,-1 vllm_max_model_len:0 vllm_max_num_seqs:0 ddp_timeout:0 moe_z_loss_coeff:-1
num_train_epochs:0,-1 max_model_len:-5,0 max_pixels:-1 soft_cache_length:0
"""
_SIZES = """
--tensor_model_parallel_size 3 -> tensor_model_parallel_size & use --tensor_model_parallel_size
--tensor_model_parallel_size 4 -> or --tensor_model_parallel_size 2
--tensor_model_parallel_size 8 -> tensor_model_parallel_size & use --tensor_model_parallel_size
--pipeline_model_parallel_size 3 -> pipeline_model_parallel_size
--pipeline_model_parallel_size 2 -> pipeline_model_parallel_size
--pipeline_model_parallel_size 8 -> pipeline_model_parallel_size
--context_parallel_size 3 -> context_parallel_size
--context_parallel_size 2 -> context_parallel_size
--expert_model_parallel_size 3 -> expert_model_parallel_size
--expert_tensor_parallel_size 4 -> expert_tensor_parallel_size
--vllm_tensor_parallel_size 3 -> vllm_tensor_parallel_size & use --vllm_tensor_parallel_size
--vllm_tensor_parallel_size 4 -> vllm_tensor_parallel_size & use --vllm_tensor_parallel_size
--virtual_pipeline_model_parallel_size 2 -> virtual_pipeline_model_parallel_size
--microbatch_group_size_per_vp_stage 2 -> microbatch_group_size_per_vp_stage
--decoder_first_pipeline_num_layers 1 -> decoder_first_pipeline_num_layers
--global_batch_size 30 -> global_batch_size
--global_batch_size 33 -> global_batch_size
--micro_batch_size 5 -> micro_batch_size
--micro_batch_size 64 -> micro_batch_size
--num_generations 7 -> num_generations
--num_generations 1000000007 -> num_generations
--generation_batch_size 40 -> generation_batch_size
--generation_batch_size 63 -> generation_batch_size
--generation_batch_size 32 --steps_per_generation 2 -> steps_per_generation
--reward_weights 1 2 -> reward_weights
--reward_weights 0.5 0.5 0.1 -> reward_weights
--ref_tensor_model_parallel_size 2 -> ref
"""
_CONTRADICTIONS = """
--dynamic_sample true --max_resample_times 0 -> max_resample_times
--kl_target 0.1 -> kl_target & beta
--delta 3 --dual_clip 3 -> delta & dual_clip
--loss_type sapo --delta 3 -> delta
--chord_sft_dataset DATA --chord_mu_peak 0.5 -> chord_sft_dataset & chord_mu_valley 0.05
--scale_rewards gdpo --advantage_estimator rloo -> scale_rewards
--infer_batch_size 4 --infer_max_tokens_per_micro_batch 1000 -> infer_batch_size
--share_prompts true --micro_batch_size 1 -> share_prompts
--recompute_elementwise true --fast_kernels false -> recompute_elementwise
--freeze_parameters_ratio 1 -> freeze_parameters_ratio
--freeze_parameters_regex .* -> freeze_parameters_regex
--freeze_parameters decoder embedding output_layer -> freeze_parameters
--freeze_parameters decoder. embed output --freeze_parameters_ratio 0.5 -> freeze_parameters
--freeze_parameters_regex [a-z] -> freeze_parameters_regex
--freeze_parameters_regex layers.( -> freeze_parameters_regex & regular expression
--freeze_parameters_ratio 1 --trainable_parameters_regex *norm -> trainable_parameters_regex
--tuner_type lora --target_regex [a- -> target_regex
--tuner_type lora --target_modules q_proj v_proj -> target_modules & linear_qkv
--tuner_type lora --target_modules linear_qkv down_proj -> target_modules & linear_qkv linear_fc2
--tuner_type lora --target_modules linear_qkv linear_qvk -> linear_qvk & use --target_modules linear_qkv
--tuner_type lora --target_modules all-linears -> target_modules & all-linear
--tuner_type lora --target_modules all-linear all-router -> all-router
--tuner_type lora --target_modules router linear_qkv -> --target_modules router
--tuner_type lora --target_modules linear_q_proj linear_proj -> linear_q_proj
--tuner_type lora --target_modules layers.99.mlp.linear_fc1 -> layers.99
--tuner_type lora --target_regex .*q_proj -> target_regex & linear_qkv
--tuner_type lora --target_regex linear_qkv -> target_regex & whole name
--tuner_type lora --modules_to_save nosuch -> modules_to_save & leave it out
--tuner_type lora --modules_to_save all-embedding lm_head -> modules_to_save & output_layer
--tuner_type lora --freeze_parameters_ratio 0.5 -> freeze_parameters_ratio & leave it out
--tuner_type lora --trainable_parameters output_layer -> trainable_parameters
--lr 1e-6 --min_lr 1e-3 -> min_lr
--lr_warmup_iters 1000 -> lr_warmup_iters
--lr_warmup_iters 5 --lr_warmup_fraction 0.1 -> lr_warmup_iters & lr_warmup_fraction
--lr_decay_style WSD -> lr_wsd_decay_iters
--start_weight_decay 0.1 -> start_weight_decay
--weight_decay_incr_style linear -> start_weight_decay
--rollout_only true -> rollout_only & rollout_dump
--async_generate true -> async_generate & vllm_mode
--max_staleness 1 -> max_staleness & async_generate
--vllm_mode server -> vllm_server
--vllm_mode server --vllm_server_host 127.0.0.1 --vllm_server_port 99999 -> vllm_server_port & 8000
--vllm_mode server --vllm_server_base_url localhost:8000 -> vllm_server_base_url & http://
--batch_invariant true --seed_completions true -> batch_invariant & vllm_mode server
--vllm_enable_lora true -> vllm_enable_lora
--tuner_type lora --vllm_enable_lora true --rollout_quantization fp8 -> rollout_quantization & vllm_enable_lora
--tuner_type lora --ref_model MODEL -> ref_model
--max_turns 3 -> max_turns
--multi_turn_scheduler nobody -> multi_turn_scheduler
--eval_before_train true -> eval_before_train & val_dataset
--eval_names a b -> eval_names & val_dataset
--val_dataset DATA --eval_names a b -> eval_names
--val_dataset DATA --eval_temperature 0 --num_generations_eval 4 -> num_generations_eval
--val_dataset DATA --eval_correct_reward accuracy -> eval_correct_reward & letters
--recompute_granularity full --recompute_method block -> recompute_num_layers
--recompute_granularity full -> recompute_method
--recompute_granularity full --recompute_num_layers 1 -> recompute_method
--recompute_granularity selective --recompute_method uniform -> recompute_method & full
--recompute_granularity selective --recompute_num_layers 1 -> recompute_num_layers & full
--sequence_parallel false --tensor_model_parallel_size 1 --context_parallel_size 2 --share_prompts true -> share_prompts
--router_replay_mode R3 -> router_replay_mode
--router_agreement_samples 4 -> router_agreement_samples
--fp16 true -> fp16
--use_vllm false -> use_vllm
--finetune false --mcore_model MODEL -> mcore_model
--finetune false -> finetune & --resume auto
--async_save true --save_total_limit 2 -> async_save & save_total_limit
--train_iters 30 -lr 5e-3 -> -lr is not a flag; use --lr
--train_iters 30 -qwertz 5 -> -qwertz is not a flag
--ignore_args_error true --save out -> --save is a flag of ms-swift 3; use --output_dir
--ignore_args_error true --train_type lora --qwertz 1 -> --tuner_type
--teacher_model MODEL --loss_type real -> teacher_model & loss_type
--streaming true --num_train_epochs 1 -> streaming & --train_iters 100
--packing true -> packing
--loss_type real --max_tokens_per_micro_batch 100 -> max_tokens_per_micro_batch
--tuner_type lora --lora_alpha nan -> lora_alpha
--tuner_type lora --target_modules nothing_like_this -> target_modules
--tuner_type lora --expert_tensor_parallel_size 2 -> expert_tensor_parallel_size
--moe_pad_expert_input_to_capacity true --expert_model_parallel_size 2 -> moe_pad_expert_input_to_capacity
--use_ray true -> use_ray
--quant_bits 4 -> quant_bits
--check_gpu Z999 --check true -> check_gpu
"""
_MISSING = """
--model /no/such/model -> --model /no/such/model
--model ./missing -> --model
--model ~/no_such_model -> --model
--model EMPTY -> --model & config.json
--model nobody/nothing --use_hf true -> nobody/nothing cannot be loaded
--ref_model /no/such/model --beta 0.1 -> --ref_model
--dataset /no/such.jsonl -> --dataset & /no/such.jsonl
--dataset nowhere.jsonl -> --dataset & nowhere.jsonl
--dataset ~/nowhere.jsonl -> --dataset & nowhere.jsonl
--dataset nowhere.jsonl#10 -> --dataset & nowhere.jsonl
--dataset data/train/nowhere.parquet -> --dataset & nowhere.parquet
--dataset DATA nowhere.csv -> --dataset & nowhere.csv
--val_dataset nowhere.jsonl -> --val_dataset & nowhere.jsonl
--val_dataset ../nowhere.json -> --val_dataset & nowhere.json
--external_plugins /no/such/plugin.py -> --external_plugins
--external_plugins letters.py -> --external_plugins
--external_plugins BROKEN -> --external_plugins & broken.py
--custom_register_path /no/such.py -> --custom_register_path
--custom_register_path BROKEN -> --custom_register_path & broken.py
--custom_dataset_info /no/such.json -> --custom_dataset_info
--adapters /no/such/adapter -> --adapters
--adapters EMPTY -> --adapters
--mcore_model /no/such/checkpoint -> --mcore_model
--mcore_model EMPTY -> --mcore_model
--mcore_adapter /no/such/checkpoint --tuner_type lora -> --mcore_adapter
--mcore_ref_model /no/such --beta 0.1 -> --mcore_ref_model
--ref_adapters /no/such --tuner_type lora --beta 0.1 -> --ref_adapters
--rollout_replay /no/such/dump -> --rollout_replay
--rollout_replay EMPTY -> --rollout_replay
--output_dir DATA -> --output_dir
--output_dir ~ -> --output_dir
--output_dir /proc/x/y -> --output_dir /proc/x/y & /proc
--rollout_dump /proc/x -> --rollout_dump /proc/x
--tensorboard_dir /proc/x -> --tensorboard_dir /proc/x
--system /no/such.txt -> --system & /no/such.txt
--report_to wandb -> --report_to & pip install wandb
--report_to tensorboard swanlab -> --report_to & pip install swanlab
--external_plugins FILE:exits.py -> --external_plugins & exits.py & __main__
--external_plugins FILE:parses.py -> --external_plugins & parses.py & __main__
--rollout_dump DATA -> --rollout_dump
"""
_REWARDS = """
--reward_funcs letter -> reward_funcs & letters
--reward_funcs Letters -> reward_funcs & letters
--reward_funcs acuracy -> reward_funcs & accuracy
--reward_funcs letters formatt -> reward_funcs & format
--reward_funcs letters,format -> reward_funcs
--reward_funcs NONE -> reward_funcs
--reward_funcs soft_overlong -> soft_cache_length & 6
--reward_funcs soft_overlong --soft_cache_length 4096 -> soft_cache_length & 6
--reward_funcs /tmp/my_reward.py -> reward_funcs
--reward_funcs letters letters -> reward_funcs & letters
--external_plugins FILE:no_call.py --reward_funcs mine -> reward_funcs & mine & __call__
--external_plugins FILE:no_call_of_orm.py --reward_funcs mine -> reward_funcs & mine & __call__
--external_plugins FILE:no_kwargs.py --reward_funcs mine -> reward_funcs & mine & __init__
--external_plugins FILE:no_columns.py --reward_funcs mine -> reward_funcs & mine & **kwargs
--external_plugins FILE:needs_more.py --reward_funcs mine -> reward_funcs & mine & __init__
--external_plugins PLAIN --reward_funcs plain -> reward_funcs & plain
--external_plugins NOT_CALLABLE --reward_funcs value -> reward_funcs & value
"""
_JSON = """
--vllm_engine_kwargs {bad -> vllm_engine_kwargs
--vllm_engine_kwargs {"a":1} -> vllm_engine_kwargs
--vllm_engine_kwargs [1] -> vllm_engine_kwargs
--vllm_engine_kwargs 5 -> vllm_engine_kwargs
--vllm_engine_kwargs {"data_parallel_size":2} -> vllm_engine_kwargs & data_parallel_size
--vllm_engine_kwargs {"tensor_parallel_size":2} -> vllm_engine_kwargs & vllm_tensor_parallel_size
--vllm_engine_kwargs {"quantization":"fp8"} -> vllm_engine_kwargs & rollout_quantization
--vllm_engine_kwargs {"max_num_batched_token":8} -> vllm_engine_kwargs & max_num_batched_tokens
--megatron_extra_kwargs {bad -> megatron_extra_kwargs
--megatron_extra_kwargs [] -> megatron_extra_kwargs
--columns {query -> columns
--columns query -> columns
--model_kwargs {x -> model_kwargs
--vllm_limit_mm_per_prompt {x -> vllm_limit_mm_per_prompt
--vllm_limit_mm_per_prompt 3 -> vllm_limit_mm_per_prompt
--rope_scaling {x -> rope_scaling
--megatron_extra_kwargs {"no_such":1} -> megatron_extra_kwargs & no_such
--megatron_extra_kwargs {"normalisation":"RMSNorm"} -> megatron_extra_kwargs & normalization
--rope_scaling yarn -> rope_scaling & max_model_len
--rope_scaling dynamic -> rope_scaling & yarn
"""
_DATASETS = """
--dataset FILE:empty.jsonl -> --dataset & empty.jsonl
--dataset FILE:few.jsonl#0 -> --dataset & few.jsonl#500
--dataset FILE:few.jsonl#-5 -> --dataset & few.jsonl
--dataset FILE:truncated.jsonl -> --dataset & truncated.jsonl & line 3
--dataset FILE:comma.jsonl -> comma.jsonl & line 1
--dataset FILE:text.jsonl -> text.jsonl & line 1
--dataset FILE:no_prompt.jsonl -> --dataset & columns
--dataset FILE:no_role.jsonl -> --dataset & role
--dataset FILE:null_content.jsonl -> --dataset & content
--dataset FILE:string_messages.jsonl -> --dataset & messages
--dataset FILE:list_messages.jsonl -> --dataset & messages
--dataset FILE:no_messages.jsonl -> --dataset & messages
--dataset FILE:only_assistant.jsonl -> --dataset & user
--dataset FILE:mixed.jsonl -> --dataset & query
--dataset FILE:few.jsonl --num_train_epochs 1 -> prompts & train_iters
--dataset FILE:long.jsonl --max_length 16 --truncation_strategy raise -> max_length
--dataset FILE:long.jsonl --max_length 16 -> max_length & row & long.jsonl
--dataset FILE:turns.jsonl --loss_scale default -> --dataset & turns.jsonl & --loss_scale last_round
--dataset FILE:twice.jsonl -> twice.jsonl, line 3 & query
--dataset FILE:half.jsonl -> half.jsonl, line 3
--dataset FILE:blank.jsonl -> blank.jsonl
--dataset FILE:number.jsonl -> --dataset & row 2 of & number.jsonl
--dataset FILE:tool_first.jsonl -> row 2 of & tool_first.jsonl
--dataset FILE:parts.jsonl -> parts.jsonl & images
--dataset FILE:column_text.jsonl -> column_text.jsonl & --columns & "text"
--dataset FILE:lines.txt -> lines.txt & --columns & "text"
--dataset FILE:strings.json -> strings.json & --columns & "text"
--dataset FILE:mixed.json -> mixed.json, element 1
--dataset FILE:long.csv -> long.csv, line 2
--dataset FILE:short.csv -> short.csv, line 3
--dataset FILE:cut.parquet -> cut.parquet
--dataset FILE:rows.tsv -> --dataset & rows.tsv
--dataset FILE:rows.jsonl.gz -> --dataset & rows.jsonl.gz
--dataset FILE:rows.xyz -> --dataset & rows.xyz
--dataset FILE:rows -> --dataset & suffix
--dataset MODEL -> --dataset & cannot be loaded
--dataset EMPTY -> --dataset & no files
--dataset ~ -> --dataset ''
--dataset DATA FILE:number.jsonl -> row 2 of & number.jsonl
--columns {"nosuch":"query"} -> --columns names nosuch
--reward_funcs accuracy -> --reward_funcs accuracy & solution
--dataset FILE:numbers.jsonl --reward_funcs accuracy -> --reward_funcs accuracy & solution has numbers
--val_dataset FILE:empty.jsonl -> empty.jsonl
--val_dataset FILE:no_role.jsonl -> --val_dataset & role
--val_dataset FILE:only_assistant.jsonl -> --val_dataset & user
--val_dataset FILE:truncated.jsonl -> truncated.jsonl & line 3
"""


_TWO_STAGES = "--tensor_model_parallel_size 1 --sequence_parallel false --pipeline_model_parallel_size 2"
_BATCHED = f"{_TWO_STAGES} --virtual_pipeline_model_parallel_size 2 --overlap_p2p_comm false"
BATCHED_MESSAGES = Case("layout", tuple(_BATCHED.split()), ("use --overlap_p2p_comm true",))
# Accepted, with a line in the log that contains these texts.
_NOTED = """
--template llama3 -> --template llama3 & qwen3
--kl_estimator k2 -> --kl_estimator k2: without effect
--kl_in_reward true -> --kl_in_reward true: without effect
--kl_horizon 5 -> --kl_horizon 5: without effect
--soft_cache_length 4 -> --soft_cache_length 4 & soft_overlong
--rollout_importance_sampling_threshold 3 -> --rollout_importance_sampling_threshold 3.0: without effect
--lora_rank 16 --target_modules linear_qkv -> --lora_rank 16: without effect & --target_modules linear_qkv: without
--sgd_momentum 0.5 -> --sgd_momentum 0.5: without effect
--wandb_project mine -> --wandb_project mine: without effect
--check_gpu H100-80G -> --check_gpu H100-80G: without effect
--vllm_engine_kwargs {"data_parallel_size":1,"tensor_parallel_size":1,"enable_expert_parallel":false} -> trains this run
--ignore_args_error true --qwertz 1 -> trains this run
--torch_dtype float32 --fp16 false -> trains this run
--lr_warmup_fraction 0.1 -> trains this run
--eval_correct_from=-1e-3 --val_dataset DATA -> trains this run
"""
NOTED: list[Case] = _cases("note", _NOTED)
CASES: list[Case] = list(
    chain(
        [BATCHED_MESSAGES, *_renamed("misspelt", _MISSPELT)],
        _renamed("other name", _OTHER_NAMES),
        _each("not an integer", "abc 1.5", _INTEGERS),
        _each("not a number", "abc 1,5", _NUMBERS),
        _each("not true or false", "maybe", _SWITCHES),
        _each("no value", "NONE", "lr model temperature loss_type output_dir"),
        _cases("choice", _CHOICES),
        _cases("range", _RANGES),
        [
            Case("range", (f"--{flag}", value), (f"--{flag}",))
            for flag, values in (part.split(":") for part in _RANGE_FLAGS.split())
            for value in values.split(",")
        ],
        _cases("size", _SIZES),
        _cases("contradiction", _CONTRADICTIONS),
        _cases("missing", _MISSING),
        _cases("reward", _REWARDS),
        _cases("JSON", _JSON),
        _cases("rows", _DATASETS),
    )
)
