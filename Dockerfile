# docker build -t lockstep . && docker run --rm -v "$PWD:/work" lockstep demo
FROM python:3.12-slim AS build
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
# The wheel brings the kernels of every instruction set, so the image needs no compiler.
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
# torch comes with CUDA unless an index without it is given: --build-arg TORCH_OPTIONS="--index-url …/whl/cpu"
ARG TORCH_OPTIONS=""
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir $TORCH_OPTIONS "torch>=2.11,<2.16" \
    && pip install --no-cache-dir /wheels/*.whl && rm -rf /wheels
WORKDIR /work
EXPOSE 8000
ENTRYPOINT ["lockstep"]
