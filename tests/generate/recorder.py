"""What stands for CUDA's capture where there is no GPU."""


class Recorder:
    """Captures as CUDA does, as far as results can tell: a replay writes the tensors that the first run made."""

    def __init__(self):
        self.captured = 0
        self.replayed = 0

    def __call__(self, function):
        self.captured += 1
        results = function()

        def replay():
            self.replayed += 1
            for result, new in zip(results, function(), strict=True):
                result.copy_(new)
            return results

        return replay
