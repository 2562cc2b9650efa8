from parasearch_jax.data.questions import load_questions
from parasearch_jax.data.types import Question

__all__ = ["Question", "load_questions"]
