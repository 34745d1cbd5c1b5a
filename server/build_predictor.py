"""From settings to the payoff predictor of an engine, and to what lets it go on learning."""

from pathlib import Path

from verdraft.scheduler.engine import Engine
from verdraft.scheduler.learning import BackgroundLearner, last_predictor
from verdraft.server.service import Text
from verdraft.server.settings import Settings, SettingsError
from verdraft.spec.features import TokenClasses, classify
from verdraft.spec.learning import OnlineLearner
from verdraft.spec.predictor import PayoffPredictor, PredictorError, load_predictor


def token_classes(text: Text) -> TokenClasses:
    """The flags of every token of a model."""
    return classify([text.tokenizer.token_bytes(token) for token in range(text.tokenizer.vocab_size)])


def add_predictor(engine: Engine, text: Text, settings: Settings) -> None:
    """Let suffix drafts be judged as the settings say. Raises SettingsError."""
    if settings.predictor == "none":
        return
    engine.drafting.estimates.classes = token_classes(text)
    engine.drafting.estimates.use(_predictor(settings))


def _predictor(settings: Settings) -> PayoffPredictor:
    if settings.predictor == "auto":
        return load_predictor()
    file = Path(settings.predictor)
    if file.exists() and not file.is_file():
        raise SettingsError(f"--predictor: expected auto, none or a file, got {str(file)!r}")
    if settings.learning == "on":
        return last_predictor(file, load_predictor())
    try:
        return load_predictor(file)
    except PredictorError as error:
        raise SettingsError(f"--predictor: {error}") from error


def learners(engine: Engine, settings: Settings) -> tuple[BackgroundLearner, ...]:
    """The thread that improves the engine's predictor; none when there is nothing to improve."""
    estimates = engine.drafting.estimates
    if settings.learning == "off" or estimates.predictor is None:
        return ()
    file = None if settings.predictor == "auto" else Path(settings.predictor)
    learner = BackgroundLearner(OnlineLearner(estimates.predictor, estimates.use), file)
    estimates.teach = learner.add
    return (learner,)
