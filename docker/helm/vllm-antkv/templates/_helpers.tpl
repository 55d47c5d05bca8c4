{{- define "vllm-antkv.name" -}}
{{ .Release.Name | trunc 53 | trimSuffix "-" }}
{{- end }}

{{- define "vllm-antkv.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "vllm-antkv.labels" -}}
{{ include "vllm-antkv.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "vllm-antkv.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* Claim with the codebooks; empty when they come with the image. */}}
{{- define "vllm-antkv.codebookClaim" -}}
{{- if eq .Values.codebooks.source "volume" -}}
{{ required "codebooks.claim must name the claim with the codebooks." .Values.codebooks.claim }}
{{- else if eq .Values.codebooks.source "calibrate" -}}
{{ include "vllm-antkv.name" . }}-codebooks
{{- end -}}
{{- end }}

{{/* What --additional-config gets. */}}
{{- define "vllm-antkv.settings" -}}
{{- $settings := .Values.settings -}}
{{- if include "vllm-antkv.codebookClaim" . -}}
{{- $settings = merge (dict "codebooks" "/codebooks") $settings -}}
{{- end -}}
{{ dict "antkv" $settings | toJson }}
{{- end }}

{{- define "vllm-antkv.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* The secrets, as environment variables. */}}
{{- define "vllm-antkv.huggingFaceToken" -}}
{{- with .Values.huggingFaceSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef: { name: {{ . }}, key: HF_TOKEN }
{{- end }}
{{- end }}

{{- define "vllm-antkv.resources" -}}
requests:
  {{- toYaml .Values.resources.requests | nindent 2 }}
limits:
  {{- toYaml .Values.resources.limits | nindent 2 }}
  {{- if .Values.gpus }}
  nvidia.com/gpu: {{ .Values.gpus }}
  {{- end }}
{{- end }}
