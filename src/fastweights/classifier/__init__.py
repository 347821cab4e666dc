"""For people with data of their own: a few examples of each class, and labels for the rest."""

from fastweights.classifier.answers import Answer, Likely
from fastweights.classifier.estimator import Classifier, Explanation

__all__ = ["Answer", "Classifier", "Explanation", "Likely"]
