"""Any engine behind a URL: OpenAI-compatible servers and the native interfaces of vLLM, SGLang, llama.cpp and TGI."""
