{{/* Names. The longest suffix has 11 characters, so that everything fits into 63; what is cut gets a digest of the whole. */}}
{{- define "agentrun.name" -}}
{{- .Values.nameOverride | default .Chart.Name -}}
{{- end -}}

{{- define "agentrun.fullname" -}}
{{- $whole := .Values.fullnameOverride -}}
{{- if not $whole -}}
{{- $name := include "agentrun.name" . -}}
{{- $whole = ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- end -}}
{{- if gt (len $whole) 52 -}}
{{- $whole = printf "%s-%s" (trunc 43 $whole | trimSuffix "-") (sha256sum $whole | trunc 8) -}}
{{- end -}}
{{- $whole -}}
{{- end -}}

{{- define "agentrun.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (ternary (include "agentrun.fullname" .) "default" .Values.serviceAccount.create) -}}
{{- end -}}

{{/* A dict of `root` and `component`. Selectors never change: no version is in them. */}}
{{- define "agentrun.selector" -}}
app.kubernetes.io/name: {{ include "agentrun.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "agentrun.labels" -}}
{{- with .root.Values.commonLabels }}{{ toYaml . }}
{{ end -}}
{{ include "agentrun.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "agentrun.image" -}}
{{- with .Values.image -}}
{{- .repository -}}{{- if .digest -}}@{{ .digest }}{{- else -}}:{{ .tag | default $.Chart.AppVersion }}{{- end -}}
{{- end -}}
{{- end -}}

{{/* Digits, whatever size: a large number would come out as 1.048576e+06. */}}
{{- define "agentrun.number" -}}
{{- if eq (float64 .) (floor .) -}}{{ int64 . }}{{- else -}}{{ . }}{{- end -}}
{{- end -}}

{{/* What all pods of the chart share; they meet the Pod Security Standard `restricted`. */}}
{{- define "agentrun.pod" -}}
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  seccompProfile:
    type: RuntimeDefault
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end -}}

{{- define "agentrun.container" -}}
image: {{ include "agentrun.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end -}}

{{- define "agentrun.egressToCluster" -}}
- ports:
    - {protocol: UDP, port: 53}
    - {protocol: TCP, port: 53}
- ports:
    {{- range .Values.networkPolicy.apiServerPorts }}
    - {protocol: TCP, port: {{ int64 . }}}
    {{- end }}
{{- end -}}

{{/* Whether the CRDs are brought in by the chart: empty if not. */}}
{{- define "agentrun.bringsCrds" -}}
{{- if and .Values.crds.install (not .Values.watchNamespaces) -}}true{{- end -}}
{{- end -}}
