# plainrl with its packages, on a CPU; with an NVIDIA GPU: docker build --build-arg SET=gpu -t plainrl:gpu .
# docs/containers.md has the commands to run it. Everything lies in /plainrl and belongs to an ordinary user.
FROM python:3.11.13-bookworm
ARG SET=cpu
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]

RUN useradd --create-home --uid 1000 plainrl && install --directory --owner plainrl --group plainrl /plainrl
WORKDIR /plainrl
USER 1000
ENV PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1 UV_COMPILE_BYTECODE=1

# The packages come first: a change of the code makes no layer of them anew.
COPY --chown=plainrl:plainrl requirements*.txt ./
COPY --chown=plainrl:plainrl tools/setup.sh tools/doctor.py tools/
RUN case "$SET" in \
        cpu) tools/setup.sh ;; \
        gpu) tools/setup.sh gpu ;; \
        *) echo "error: SET must be cpu or gpu, not $SET" >&2; exit 2 ;; \
    esac

COPY --chown=plainrl:plainrl . .
ENV PATH=/plainrl/.venv/bin:/plainrl/.venv-gpu/bin:$PATH
CMD ["make", "help"]
