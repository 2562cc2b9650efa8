from parasearch_jax.data.questions import load_question_sets, load_questions
from parasearch_jax.data.types import Question

__all__ = ["Question", "load_question_sets", "load_questions"]
