"""A PPO/GRPO trainer for language models. Start reading at `main.py`, then `trainers/ppo.py`."""

__version__ = "0.1.0"
