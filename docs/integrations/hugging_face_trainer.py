"""Compresses the gradients of a Hugging Face Trainer, and continues exactly from its checkpoints.

torchrun --nproc-per-node 2 hugging_face_trainer.py --output_dir out [--resume_from_checkpoint out/checkpoint-6]

On GPUs, leave out use_cpu and ddp_backend for NCCL; for compression="auto", set ddp_backend="cpu:gloo,cuda:nccl".
"""

from pathlib import Path

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainerCallback, TrainingArguments

from gradwire import ErrorFeedback, ddp_comm_hook


class CompressedExchange(TrainerCallback):
    """Registers a hook with DDP when training begins. Every rank saves the hook's state with each checkpoint. Of a checkpoint
    outside output_dir, the arguments must have the path, since a callback does not see that of train()."""

    def __init__(self, trainer, compression, **options):
        self.trainer = trainer
        self.hook = ddp_comm_hook(compression, trainer.model.named_parameters(), **options)

    def on_train_begin(self, args, state, control, **kwargs):
        self.trainer.model_wrapped.register_comm_hook(None, self.hook)
        if state.global_step:  # Trainer has loaded a checkpoint: from output_dir, if the arguments name none
            file = self.file(args, state, args.resume_from_checkpoint)
            self.hook.load_state_dict(torch.load(file, weights_only=True))

    def on_save(self, args, state, control, **kwargs):
        torch.save(self.hook.state_dict(), self.file(args, state))

    def on_train_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            print(self.hook.stats)
        self.hook.close()

    def file(self, args, state, folder=None):
        """Return the file of this rank in a checkpoint: the residuals of error feedback differ from rank to rank."""
        return Path(folder or f"{args.output_dir}/checkpoint-{state.global_step}", f"gradwire.rank{dist.get_rank()}.pt")


# Defaults for this example; flags on the command line replace them.
parser = HfArgumentParser(TrainingArguments)
parser.set_defaults(use_cpu=True, ddp_backend="gloo", report_to="none", disable_tqdm=True, logging_steps=3)
parser.set_defaults(max_steps=12, save_steps=6, learning_rate=1e-3)
(arguments,) = parser.parse_args_into_dataclasses()

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=32, n_embd=64, n_layer=2, n_head=2, bos_token_id=0))
texts = torch.randint(128, (256, 1)).add(torch.arange(32)).remainder(128)  # every token is the one before plus 1
dataset = [{"input_ids": text, "labels": text} for text in texts]

trainer = Trainer(model=model, args=arguments, train_dataset=dataset)
callback = CompressedExchange(trainer, ErrorFeedback("int4"))
trainer.add_callback(callback)
trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
hook = callback.hook
