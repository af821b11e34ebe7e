# CPU image. Build:  docker build -t slipstream:0.1.0 --build-arg TORCH_INDEX=URL .   (an index with CPU builds of PyTorch)
# Run:    docker run -p 127.0.0.1:8000:8000 -e SLIPSTREAM_API_KEY=... -v slipstream-models:/models slipstream:0.1.0
FROM python:3.11-slim

ARG TORCH_INDEX=
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 SLIPSTREAM_CACHE=/models HF_HOME=/models/huggingface

WORKDIR /app
COPY pyproject.toml constraints-cpu.txt README.md LICENSE ./
COPY slipstream ./slipstream
RUN pip install -c constraints-cpu.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} ".[voice]" \
    && useradd --create-home slipstream && mkdir /models && chown slipstream /models

USER slipstream
VOLUME /models
EXPOSE 8000
HEALTHCHECK --start-period=120s CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=5)"]
# The container's own address has to be bound; set SLIPSTREAM_API_KEY, or publish the port to 127.0.0.1 only.
ENTRYPOINT ["slipstream"]
CMD ["serve", "--host", "0.0.0.0"]
