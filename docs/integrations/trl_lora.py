"""Fine-tunes a language model with trl's SFTTrainer and a LoRA of peft, over the backend "gradwire".

torchrun --nproc-per-node 2 trl_lora.py --output_dir out
"""

import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

from gradwire import ddp_comm_hook

hook = ddp_comm_hook("none")  # a LoRA has few gradients: a codec would save no time


class Exchange(TrainerCallback):
    """Registers the hook with DDP, in which the trainer wraps the model when training begins."""

    def on_train_begin(self, args, state, control, **kwargs):
        trainer.model_wrapped.register_comm_hook(None, hook)


dist.init_process_group("gradwire")  # before SFTConfig, which does not know the name
# Defaults for this example; flags on the command line replace them.
parser = HfArgumentParser(SFTConfig)
parser.set_defaults(use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, logging_steps=6, max_steps=12)
(arguments,) = parser.parse_args_into_dataclasses()

torch.manual_seed(0)
words = {"<end>": 0, **{f"w{number}": number for number in range(1, 128)}}
tokenizer = Tokenizer(WordLevel(words, unk_token="<end>"))
tokenizer.pre_tokenizer = Whitespace()
texts = [" ".join(f"w{1 + (start + place) % 127}" for place in range(24)) for start in range(256)]
trainer = SFTTrainer(
    GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=32, n_embd=64, n_layer=2, n_head=2, bos_token_id=0)),
    args=arguments,
    train_dataset=Dataset.from_dict({"text": texts}),
    processing_class=PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>"),
    peft_config=LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"),
    callbacks=[Exchange()],
)
trainer.train()
model = trainer.model
if dist.get_rank() == 0:
    print(hook.stats)
hook.close()
